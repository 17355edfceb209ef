"""Tool: a function that the model may call. Checks a request's tools, and makes grammar rules of
their arguments' schemas. Knows OpenAI's definition of a tool; no format of calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import UsageError
from penstock.text.schema_numbers import hold_numbers, may_have_large_numbers

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
NAME_SAID = "1 to 128 of the letters a-z, A-Z, 0-9 and _ . : / -"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. parameters: a JSON Schema of an object, for its
    arguments. strict: every keyword of the schema is enforced, and a call has no other arguments.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of the arguments. Without `parameters` it allows no arguments."""
        return {
            "type": "object",
            **(self.parameters or {"properties": {}, "additionalProperties": False}),
        }

    def told(self) -> dict[str, Any]:
        """Returns the tool as in a body of OpenAI's chat API, which chat templates expect."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        kept = {key: value for key, value in function.items() if value is not None}
        return {"type": "function", "function": kept}


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises UsageError for invalid or duplicate names, and for parameters that aren't the schema
    of an object."""
    seen: set[str] = set()
    for at, tool in enumerate(tools):
        where = f"tools[{at}].function"
        if NAME.fullmatch(tool.name) is None:
            raise _wrong(f"{where}.name must be {NAME_SAID}", f"{where}.name")
        if tool.name in seen:
            raise _wrong(
                f"{where}.name was there before: give each tool its own name", f"{where}.name"
            )
        seen.add(tool.name)
        if tool.parameters.get("type", "object") != "object":
            raise _wrong(
                f"{where}.parameters must be the schema of an object: type object",
                f"{where}.parameters",
            )


def _wrong(rule: str, param: str) -> UsageError:
    return UsageError(rule, param=param, rule=rule)


def lark_text(text: str) -> str:
    """Returns a text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def schema_rule(name: str, tool: Tool) -> str:
    """Returns a Lark rule with this name, which matches JSON by the tool's schema."""
    return f"{name}: %json {json_text(tool.schema, strict=tool.strict)}"


def json_text(schema: dict[str, Any], *, strict: bool, white: str | None = None) -> str:
    """Returns a schema for llguidance, as JSON text with the library's options. white: regex of the
    white space that is allowed between JSON's parts; None: no white space, since models write it
    without end. strict: False: ignore unknown keywords. Raises UsageError for numbers that cannot
    be enforced exactly."""
    options: dict[str, Any] = {"whitespace_flexible": white is not None, "lenient": not strict}
    options |= {"coerce_one_of": not strict} | (
        {} if white is None else {"whitespace_pattern": white}
    )
    text = json.dumps(schema, ensure_ascii=False)
    try:
        held = hold_numbers(schema) if may_have_large_numbers(text) else schema
    except UsageError as error:
        raise _wrong(error.rule.replace("structured_outputs", "tools", 1), "tools") from error
    return json.dumps({**held, "x-guidance": options}, ensure_ascii=False)
