"""lfm2_calls: tool calls in LFM2's format. They are a list of Python calls or of JSON objects:

    <|tool_call_start|>[get_weather(city="Paris"), ping()]<|tool_call_end|>
    <|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|tool_call_end|>

A list is read once it is complete. Knows this format alone. Source: the chat templates of these
models.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from typing import Any

from penstock.text.parsers.json_mending import json_text_of
from penstock.text.parsers.tool import Tool, lark_text, schema_rule

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
# JSON's words, which Python parses as variable names
_WORDS = {"true": True, "false": False, "null": None}
# errors that parsing a text as Python may raise
_NO_LIST = (
    SyntaxError,
    ValueError,
    RecursionError,
    MemoryError,
)


def read_calls(listed: str) -> list[tuple[str, str]]:
    """Parses the text between the marks. Returns the calls as (name, arguments in JSON), or [] if
    the text is not exactly a list of calls."""
    try:
        parsed = ast.parse(listed.strip(), mode="eval").body
        each = parsed.elts if isinstance(parsed, ast.List) else [parsed]
        return [(name, json_text_of(arguments)) for name, arguments in map(_call, each)]
    except _NO_LIST:
        return []


def _call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    """Returns a call's name and arguments. Raises ValueError if the node is no call."""
    if (
        isinstance(node, ast.Call)
        and not node.args
        and all(word.arg is not None for word in node.keywords)
    ):
        return ast.unparse(node.func), {str(word.arg): _value(word.value) for word in node.keywords}
    made = _value(node)
    if not isinstance(made, dict) or not isinstance(made.get("name"), str):
        raise ValueError("no call")
    arguments = made.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError("no arguments")
    return made["name"], arguments


def _value(node: ast.expr) -> Any:
    """Returns a literal's value. Raises ValueError if it is no literal or cannot be JSON."""
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("no key")
        return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    said = ast.literal_eval(node)
    if not isinstance(said, str | int | float | None):
        raise ValueError("none of JSON's")
    return said


def call_rest(tools: Sequence[Tool]) -> str:
    """Returns Lark rules for these tools. The rule `call_rest` is the text between a call's marks,
    with the call as a JSON object."""
    heads = [lark_text(f'[{{"name": {json.dumps(tool.name)}, "arguments": ') for tool in tools]
    bodies = " | ".join(f"{head} arguments_{at}" for at, head in enumerate(heads))
    rules = "\n".join(schema_rule(f"arguments_{at}", tool) for at, tool in enumerate(tools))
    return f"call_rest: ({bodies}) {lark_text('}]')}\n{rules}\n"
