"""Structs of the messages in a chat's body. Also raises errors for fields that aren't served. Knows
no tokenizer."""

from __future__ import annotations

from typing import Any, Literal, get_args

from msgspec import Struct

from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.tool_forms import CalledFunction, ToolCall
from penstock.server.openai.unsupported_fields import CALLED, MESSAGE, sift, unmarked
from penstock.text.chat import MAY_SAY_NOTHING

Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = get_args(Role)


class TextPart(Struct, forbid_unknown_fields=True, kw_only=True):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """One message of a chat. A message of the assistant may have tool calls or reasoning instead of
    content. A message of a tool names the call that it answers."""

    role: Role
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        """The content as text. Parts are joined by newlines, as in vLLM for templates that expect
        text."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    @property
    def thought(self) -> str | None:
        """The message's reasoning, which may be in the field `reasoning` or `reasoning_content`."""
        return self.reasoning_content if self.reasoning is None else self.reasoning

    @property
    def size(self) -> int:
        """Number of characters of the content, the calls and the reasoning."""
        calls = sum(
            len(call.function.name) + len(call.function.arguments) for call in self.tool_calls or ()
        )
        return len(self.text) + calls + len(self.thought or "")


_BELONGS = {
    "tool_calls": "assistant",
    "reasoning": "assistant",
    "reasoning_content": "assistant",
    "tool_call_id": "tool",
}


def sift_message(raw: Any, where: str) -> Any:
    """Removes null fields of a message. where: its path in the body, for errors. Raises HttpError
    for fields that aren't served. Types are checked later by the struct."""
    if not isinstance(raw, dict):
        return raw
    kept = sift(raw, Message.__struct_fields__, MESSAGE, f"{where}.")
    role = kept.get("role")
    for name, whose in _BELONGS.items():
        if role != whose and kept.get(name):
            message = f"{where}.{name} belongs to a message of the {whose}: leave it out"
            raise HttpError(message, param=f"{where}.{name}")
    if isinstance(role, str) and role not in ROLES:
        raise HttpError(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    if "content" not in kept and role not in MAY_SAY_NOTHING:
        raise HttpError(
            f"{where}.content is missing: text, or a list of text parts", param=f"{where}.content"
        )
    content = kept.get("content")
    for at, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
            name = f"{where}.content[{at}].type"
            message = f"{name} must be text: images, audio and files are not served"
            raise HttpError(message, param=name, code="unsupported_parameter")
    if isinstance(content, list):
        kept["content"] = [
            unmarked(part, TextPart, f"{where}.content[{at}]") for at, part in enumerate(content)
        ]
    calls = kept.get("tool_calls")
    if isinstance(calls, list):
        kept["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)
        ]
    return kept


def _call(raw: Any, where: str) -> Any:
    """Removes null fields of a tool call in an earlier answer. Raises HttpError for fields that
    aren't served."""
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(function, dict):
        return raw
    return {
        **raw,
        "function": sift(function, CalledFunction.__struct_fields__, CALLED, f"{where}.function."),
    }
