"""OpenAI's /v1/responses, its body: read and turned into the chat that it is. Nothing is stored, so what a response
needs of earlier ones comes in `input`. It knows both forms; how a chat is run is translate's.

    instructions, then `input`: a text, or items
      message                  a message of its role
      reasoning                the reasoning of the assistant's message behind it
      function_call            a call in the assistant's message before it, else in one of its own
      function_call_output     a tool's message
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from penstock.server.openai.forms import (
    ChatForm,
    Effort,
    Int,
    JsonSchema,
    Message,
    ResponseFormat,
    Role,
    check_chat,
    convert,
    read_object,
)
from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.http_limits import USUAL, HttpLimits
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
from penstock.server.openai.unsupported_fields import RESPONSES, sift

# Fields of the chat that a fault may be of -> what a response's body calls them.
PARAMS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "structured_outputs": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class FunctionTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that may be called."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class NamedFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    """The function that is to be called."""

    type: Literal["function"]
    name: str


class TextFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    """The form of the text: free, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: Json | None = None
    strict: bool | None = None


class TextOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """What the text is to be like."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """How much is to be thought. summary: there is none, the reasoning itself is given."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class ResponsesForm(Struct, forbid_unknown_fields=True, kw_only=True):
    """A body of /v1/responses."""

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
    """The chat that a response's body is. asked: what its answer says again of the body."""

    asked: Json


def read_responses(body: bytes | bytearray, limits: HttpLimits = USUAL) -> ResponsesChat:
    """A response's form, as a chat. Raises HttpError."""
    raw = sift(read_object(body, limits), ResponsesForm.__struct_fields__, RESPONSES)
    if "input" not in raw:
        raise HttpError("input is missing: text, or a list of items", param="input")
    for at, tool in enumerate(raw["tools"] if isinstance(raw.get("tools"), list) else ()):
        if isinstance(tool, dict) and tool.get("type") not in (None, "function"):
            message = f"tools[{at}].type must be function: built-in tools are not run here"
            raise HttpError(message, param=f"tools[{at}].type", code="unsupported_parameter")
    form = convert(raw, ResponsesForm)
    if isinstance(form.input, list) and len(form.input) > limits.max_messages:
        raise HttpError(f"input has more than {limits.max_messages} items: send fewer", param="input")
    chat = ResponsesChat(messages=_messages(form), asked=_asked(raw, form), **_options(form))
    check_chat(chat)
    return chat


def _options(form: ResponsesForm) -> Json:
    same = ("model", "temperature", "top_p", "seed", "stream", "parallel_tool_calls", "timeout", "cache_salt")
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
        raise HttpError("text.format.schema is missing: the JSON Schema of the text", param="text.format.schema")
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=asked.schema, strict=asked.strict))


def _asked(raw: Json, form: ResponsesForm) -> Json:
    """What an answer says again of its body, with what counts where nothing was said."""
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


# --- items


class ItemMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    """A message; of an earlier response it has an id and a status."""

    role: Role
    content: str | list[Json]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ItemCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """A call of an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class ItemOutput(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a called function gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Json]
    id: str | None = None
    status: str | None = None


class ItemReasoning(Struct, forbid_unknown_fields=True, kw_only=True):
    """Reasoning of an earlier response."""

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
    """Returns the messages that a body's instructions and input are. Raises HttpError."""
    found = [] if form.instructions is None else [Message(role="system", content=form.instructions)]
    if isinstance(form.input, str):
        return [*found, Message(role="user", content=form.input)]
    thought: str | None = None
    for at, raw in enumerate(form.input):
        item = _item(raw, f"input[{at}]")
        if isinstance(item, ItemReasoning):
            thought = _text(item.content or item.summary, f"input[{at}].content")
            continue
        message = _message(item, found, f"input[{at}]")
        if message.role == "assistant" and thought is not None:
            message.reasoning, thought = thought, None
    if not found:
        raise HttpError("input is empty: give a text, or one item at least", param="input")
    return found


def _item(raw: Json, where: str) -> ItemMessage | ItemCall | ItemOutput | ItemReasoning:
    kind = raw.get("type") or "message"
    if not isinstance(kind, str) or kind not in _ITEMS:
        message = f"{where}.type must be one of {', '.join(_ITEMS)}"
        raise HttpError(message, param=f"{where}.type", code="unsupported_parameter")
    kept = {name: value for name, value in raw.items() if value is not None}
    return convert(kept, _ITEMS[kind], where)


def _message(item: ItemMessage | ItemCall | ItemOutput, found: list[Message], where: str) -> Message:
    """Puts an item into the messages. Returns its own."""
    if isinstance(item, ItemCall):
        call = ToolCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
        if not found or found[-1].role != "assistant":
            found.append(Message(role="assistant", tool_calls=[]))
        found[-1].tool_calls = [*(found[-1].tool_calls or []), call]
    elif isinstance(item, ItemOutput):
        text = _text(item.output, f"{where}.output")
        found.append(Message(role="tool", content=text, tool_call_id=item.call_id))
    else:
        found.append(Message(role=item.role, content=_text(item.content, f"{where}.content")))
    return found[-1]


def _text(content: str | list[Json], where: str) -> str:
    """Parts of text, joined by line ends. Raises HttpError for other parts."""
    if isinstance(content, str):
        return content
    texts = []
    for at, part in enumerate(content):
        text: Any = part.get("text")
        if part.get("type") not in (*_TEXTS, "summary_text") or not isinstance(text, str):
            message = f"{where}[{at}] must be text ({', '.join(_TEXTS)}): images, audio and files are not served"
            raise HttpError(message, param=f"{where}[{at}]", code="unsupported_parameter")
        texts.append(text)
    return "\n".join(texts)
