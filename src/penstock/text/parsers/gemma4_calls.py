"""gemma4_calls: tool calls in Gemma 4's format. Each call stands between two marks:

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3,where:{rooms:[1,2]}}<tool_call|>

Keys have no quotes, strings are quoted by `<|"|>`; JSON strings are read too. Knows this format
alone. Source: Gemma 4's prompt formatting (ai.google.dev/gemma/docs/core/prompt-formatting-gemma4).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from penstock.text.parsers.json_mending import json_text_of
from penstock.text.parsers.tool import Tool, lark_text, schema_rule

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
DEEPEST = 64  # levels of nested objects and lists
_HEAD = re.compile(r"\s*call:([A-Za-z0-9_.:/-]+)\s*(?=\{)")
_KEY = re.compile(r"\s*([^\s{}\[\],:\"]+)\s*:")
_SPACE = re.compile(r"\s*")
_JSON = json.JSONDecoder()


def read_calls(text: str) -> list[tuple[str, str]]:
    """Parses the text between the marks. Returns [(name, arguments in JSON)], or [] if the text is
    not exactly one call."""
    head = _HEAD.match(text)
    if head is None:
        return []
    try:
        arguments, behind = _value(text, head.end(), 0)
    except ValueError:
        return []
    return [] if text[behind:].strip() else [(head[1], json_text_of(arguments))]


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Parses the value at position `at`. Returns it and the position after it. Raises ValueError if
    there is none."""
    at = _past_space(text, at)
    if depth > DEEPEST:
        raise ValueError("too deep")
    if text.startswith(QUOTE, at):
        end = text.index(QUOTE, at + len(QUOTE))
        return text[at + len(QUOTE) : end], end + len(QUOTE)
    if text[at : at + 1] in ("{", "["):
        return _members(text, at, depth)
    try:
        return _JSON.raw_decode(text, at)
    except RecursionError:  # can occur only near the interpreter's recursion limit
        raise ValueError("too deep") from None


def _members(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Parses an object or a list whose opening bracket is at `at`. Returns it and the position
    after it."""
    is_object, close = text[at] == "{", {"{": "}", "[": "]"}[text[at]]
    keyed: dict[str, Any] = {}
    listed: list[Any] = []
    at = _past_space(text, at + 1)
    while not text.startswith(close, at):
        if is_object:
            key, at = _key(text, at)
            keyed[key], at = _value(text, at, depth + 1)
        else:
            value, at = _value(text, at, depth + 1)
            listed.append(value)
        at = _past_space(text, at)
        if text.startswith(",", at):
            at = _past_space(text, at + 1)
        elif not text.startswith(close, at):
            raise ValueError("no end")
    return (keyed if is_object else listed), at + 1


def _key(text: str, at: int) -> tuple[str, int]:
    """Parses a key, with or without quotes. Returns it and the position of its value."""
    if (bare := _KEY.match(text, at)) is not None and not text.startswith(QUOTE, at):
        return bare[1], bare.end()
    key, at = _value(text, at, 0)
    at = _past_space(text, at)
    if not isinstance(key, str) or not text.startswith(":", at):
        raise ValueError("no key")
    return key, at + 1


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "no space is some, too"
    return found.end()


def call_rest(tools: Sequence[Tool]) -> str:
    """Returns Lark whose rule `call_rest` is the text between a call's marks: a name, and a JSON
    object."""
    bodies = " | ".join(
        f"{lark_text(f'call:{tool.name}')} arguments_{at}" for at, tool in enumerate(tools)
    )
    rules = "\n".join(schema_rule(f"arguments_{at}", tool) for at, tool in enumerate(tools))
    return f"call_rest: {bodies}\n{rules}\n"
