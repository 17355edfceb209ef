"""Structs of OpenAI's tools and tool calls. Has the tools of a body, the calls in earlier answers,
and tool_choice. Knows OpenAI's JSON; text.parsers knows how models write calls."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from penstock.text.parsers.tool import Tool

Json = dict[str, Any]


class FunctionForm(Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call."""

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
    """The name of the function that the model must call."""

    name: str


class NamedTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool_choice: the tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    """The function of a call. arguments: JSON as text."""

    name: str
    arguments: str = "{}"


class ToolCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool call in an earlier answer, as the client sends it back."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # a field of streamed calls, which some clients send back
