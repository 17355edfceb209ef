"""Parses bodies of OpenAI's /v1/responses. Converts them to a chat. The server stores no responses,
so earlier ones come in `input`. Knows the structs of both bodies; translate.py turns the chat into
a call.

    instructions, then `input`: a text, or items
      message                  a message of its role
      reasoning                reasoning of the assistant's next message, else of an empty one
      function_call            a call in the assistant's previous message, else in a new one
      function_call_output     a tool's message
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from msgspec import Struct

from penstock.server.openai.forms import (
    ChatForm,
    Effort,
    Int,
    JsonSchema,
    ResponseFormat,
    check_chat,
    convert,
    read_object,
)
from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.http_limits import USUAL, HttpLimits
from penstock.server.openai.message_forms import Message, Role, TextPart
from penstock.server.openai.tool_forms import (
    CalledFunction,
    FunctionForm,
    FunctionName,
    Json,
    NamedTool,
    ToolCall,
    ToolChoice,
    ToolForm,
)
from penstock.server.openai.unsupported_fields import CALLED, RESPONSES, sift, unmarked_tools

# field of a chat's body in errors -> its name in the body of /v1/responses
PARAMS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}


class FunctionTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool: a function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class NamedFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool_choice: the function that the model must call."""

    type: Literal["function"]
    name: str


class TextFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    """Format of the answer's text: free, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: Json | None = None
    strict: bool | None = None


class TextOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of the answer's text. verbosity: accepted, but changes nothing."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of reasoning. effort: amount of reasoning. summary: accepted, but the reasoning
    itself is returned."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class ResponsesForm(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /v1/responses."""

    input: str | list[Json]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Int | None = None
    stream: bool = False
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: Json | None = None
    metadata: Json | None = None
    timeout: float | None = None
    cache_salt: str | None = None


class ResponsesChat(ChatForm, kw_only=True):
    """The chat that a body of /v1/responses becomes. asked: fields of the body that the answer
    repeats."""

    asked: Json
    format_field: ClassVar[str] = "text.format"


def read_responses(body: bytes | bytearray, limits: HttpLimits = USUAL) -> ResponsesChat:
    """Parses a body of /v1/responses, and converts it to a chat. Raises HttpError."""
    raw = sift(read_object(body, limits), ResponsesForm.__struct_fields__, RESPONSES)
    if "input" not in raw:
        raise HttpError("input is missing: text, or a list of items", param="input")
    for at, tool in enumerate(raw["tools"] if isinstance(raw.get("tools"), list) else ()):
        if isinstance(tool, dict) and tool.get("type") not in (None, "function"):
            message = f"tools[{at}].type must be function: built-in tools are not run here"
            raise HttpError(message, param=f"tools[{at}].type", code="unsupported_parameter")
    if "tools" in raw:
        raw["tools"] = unmarked_tools(raw["tools"], FunctionTool)
    form = convert(raw, ResponsesForm)
    if isinstance(form.input, list) and len(form.input) > limits.max_messages:
        raise HttpError(
            f"input has more than {limits.max_messages} items: send fewer", param="input"
        )
    chat = ResponsesChat(messages=_messages(form), asked=_asked(raw, form), **_options(form))
    check_chat(chat)
    return chat


def _options(form: ResponsesForm) -> Json:
    same = (
        "model",
        "temperature",
        "top_p",
        "seed",
        "stream",
        "parallel_tool_calls",
        "timeout",
        "cache_salt",
    )
    choice: ToolChoice | NamedFunction | None = form.tool_choice
    if isinstance(choice, NamedFunction):
        choice = NamedTool(type="function", function=FunctionName(name=choice.name))
    return {
        **{name: getattr(form, name) for name in same},
        "max_tokens": form.max_output_tokens,
        "chat_template_kwargs": form.chat_template_kwargs,
        "tools": [_tool(tool) for tool in form.tools] if form.tools else None,
        "tool_choice": choice,
        "response_format": _format(form),
        "reasoning_effort": None if form.reasoning is None else form.reasoning.effort,
    }


def _tool(tool: FunctionTool) -> ToolForm:
    function = FunctionForm(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return ToolForm(type="function", function=function)


def _format(form: ResponsesForm) -> ResponseFormat | None:
    asked = None if form.text is None else form.text.format
    if asked is None:
        return None
    if asked.type != "json_schema":
        return ResponseFormat(type=asked.type)
    if asked.schema is None:
        raise HttpError(
            "text.format.schema is missing: the JSON Schema of the text", param="text.format.schema"
        )
    return ResponseFormat(
        type="json_schema", json_schema=JsonSchema(schema=asked.schema, strict=asked.strict)
    )


def _asked(raw: Json, form: ResponsesForm) -> Json:
    """Returns the fields of the body that the answer repeats, with defaults for missing ones."""
    text = raw.get("text") or {}
    reasoning = raw.get("reasoning") or {}
    return {
        "instructions": form.instructions,
        "max_output_tokens": form.max_output_tokens,
        "metadata": form.metadata or {},
        "parallel_tool_calls": form.parallel_tool_calls,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": raw.get("tool_choice", "auto"),
        "tools": raw.get("tools") or [],
    }


# --- input items


class ItemMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    """An input item: a message. If it is from an earlier response, it has an id and a status."""

    role: Role
    content: str | list[Json]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ItemCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """An input item: a function call of an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class ItemOutput(Struct, forbid_unknown_fields=True, kw_only=True):
    """An input item: the output of a called function."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Json]
    id: str | None = None
    status: str | None = None


class ItemReasoning(Struct, forbid_unknown_fields=True, kw_only=True):
    """An input item: reasoning of an earlier response."""

    type: Literal["reasoning"]
    summary: list[Json] = []
    content: list[Json] | None = None
    id: str | None = None
    status: str | None = None
    encrypted_content: str | None = None


_ITEMS: dict[str, type[ItemMessage | ItemCall | ItemOutput | ItemReasoning]] = {
    "message": ItemMessage,
    "function_call": ItemCall,
    "function_call_output": ItemOutput,
    "reasoning": ItemReasoning,
}
_TEXTS = ("input_text", "output_text", "text", "reasoning_text")


def _messages(form: ResponsesForm) -> list[Message]:
    """Returns the chat messages of a body's instructions and input. Raises HttpError."""
    turns = _Turns()
    if form.instructions is not None:
        turns.found.append(Message(role="system", content=form.instructions))
    if isinstance(form.input, str):
        return [*turns.found, Message(role="user", content=form.input)]
    for at, raw in enumerate(form.input):
        turns.take(_item(raw, f"input[{at}]"), f"input[{at}]")
    turns.end()
    if not turns.found:
        raise HttpError("input is empty: give a text, or one item at least", param="input")
    return turns.found


def _item(raw: Json, where: str) -> ItemMessage | ItemCall | ItemOutput | ItemReasoning:
    kind = raw.get("type") or "message"
    if not isinstance(kind, str) or kind not in _ITEMS:
        message = f"{where}.type must be one of {', '.join(_ITEMS)}"
        raise HttpError(message, param=f"{where}.type", code="unsupported_parameter")
    known = _ITEMS[kind].__struct_fields__
    return convert(
        sift(raw, known, CALLED if kind == "function_call" else {}, f"{where}."),
        _ITEMS[kind],
        where,
    )


class _Turns:
    """Converts input items to chat messages. Consecutive reasoning, text and calls of the assistant
    become one message; a second text begins a new one."""

    def __init__(self) -> None:
        self.found: list[Message] = []
        self._thought: str | None = None  # reasoning that belongs to the assistant's next text

    def take(self, item: ItemMessage | ItemCall | ItemOutput | ItemReasoning, where: str) -> None:
        """Adds an item to the messages. Raises HttpError."""
        if isinstance(item, ItemReasoning):
            text = Message(
                role="assistant", content=_content(item.content or item.summary, f"{where}.content")
            ).text
            self._thought = text if self._thought is None else f"{self._thought}\n{text}"
        elif isinstance(item, ItemCall):
            turn = self._turn()
            call = ToolCall(
                id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments)
            )
            turn.tool_calls = [*(turn.tool_calls or []), call]
        elif isinstance(item, ItemOutput):
            self.end()
            content = _content(item.output, f"{where}.output")
            self.found.append(Message(role="tool", content=content, tool_call_id=item.call_id))
        else:
            said = Message(role=item.role, content=_content(item.content, f"{where}.content"))
            if item.role != "assistant":
                self.end()
                self.found.append(said)
                return
            last = self.found[-1] if self.found else said
            anew = last.content is not None and (self._thought is not None or not last.tool_calls)
            turn = self._turn(anew=anew)
            turn.content = said.content if turn.content is None else turn.text + said.text

    def end(self) -> None:
        """Adds reasoning that no text has followed, as an empty message."""
        if self._thought is not None:
            self._turn()

    def _turn(self, *, anew: bool = False) -> Message:
        """Returns the assistant's current message, or a new one, with the reasoning before it.
        anew: begin a new one."""
        if anew or not self.found or self.found[-1].role != "assistant":
            self.found.append(Message(role="assistant"))
        turn = self.found[-1]
        if self._thought is not None:
            turn.reasoning = (
                self._thought if turn.reasoning is None else f"{turn.reasoning}\n{self._thought}"
            )
            self._thought = None
        return turn


def _content(content: str | list[Json], where: str) -> str | list[TextPart]:
    """Converts an item's content to a text or text parts. Raises HttpError for other parts."""
    if isinstance(content, str):
        return content
    parts = []
    for at, part in enumerate(content):
        text: Any = part.get("text")
        if part.get("type") not in (*_TEXTS, "summary_text") or not isinstance(text, str):
            message = (
                f"{where}[{at}] must be text ({', '.join(_TEXTS)}): images, audio and files are not"
                " served"
            )
            raise HttpError(message, param=f"{where}[{at}]", code="unsupported_parameter")
        parts.append(TextPart(type="text", text=text))
    return parts
