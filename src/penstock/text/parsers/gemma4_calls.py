"""Tool calls as Gemma 4 writes them, each between marks of its own:

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3,where:{rooms:[1,2]}}<tool_call|>

Keys are bare, texts stand between `<|"|>`; JSON's own strings are read too. It knows this format
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
DEEPEST = 64  # objects and lists in each other
_HEAD = re.compile(r"\s*call:([A-Za-z0-9_.:/-]+)\s*(?=\{)")
_KEY = re.compile(r"\s*([^\s{}\[\],:\"]+)\s*:")
_SPACE = re.compile(r"\s*")
_JSON = json.JSONDecoder()


def read_calls(text: str) -> list[tuple[str, str]]:
    """Returns the call, its name and its arguments in JSON; none where it is no call alone."""
    head = _HEAD.match(text)
    if head is None:
        return []
    try:
        arguments, behind = _value(text, head.end(), 0)
    except ValueError:
        return []
    return [] if text[behind:].strip() else [(head[1], json_text_of(arguments))]


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Returns a value, and where the text goes on behind it. Raises ValueError for what is none."""
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
    except RecursionError:  # it holds no lists, but a text may
        raise ValueError("too deep") from None


def _members(text: str, at: int, depth: int) -> tuple[Any, int]:
    """An object or a list, whose bracket stands at `at`."""
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
    """A key, bare or a text, and where its value begins."""
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
    """Returns Lark whose rule `call_rest` is what stands between a call's marks: a name, and an
    object of JSON."""
    bodies = " | ".join(
        f"{lark_text(f'call:{tool.name}')} arguments_{at}" for at, tool in enumerate(tools)
    )
    rules = "\n".join(schema_rule(f"arguments_{at}", tool) for at, tool in enumerate(tools))
    return f"call_rest: {bodies}\n{rules}\n"
