"""OpenAI's forms of tools: those that may be called, calls that were made, and the choice of a
tool. Knows JSON's shapes; text.parsers knows how models write calls."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from penstock.text.parsers.tool import Tool

Json = dict[str, Any]


class FunctionForm(Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class ToolForm(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool of a chat."""

    type: Literal["function"]
    function: FunctionForm

    @property
    def tool(self) -> Tool:
        made = self.function
        return Tool(
            name=made.name,
            description=made.description,
            parameters=made.parameters or {},
            strict=made.strict is True,
        )


class FunctionName(Struct, forbid_unknown_fields=True, kw_only=True):
    """The name of the function that must be called."""

    name: str


class NamedTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that was called. arguments: JSON as text."""

    name: str
    arguments: str = "{}"


class ToolCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """A call in an earlier answer, as that contained it."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # part of streamed calls, which some clients send back
