"""Answers of chats with parsed text. Separates reasoning and tool calls from content, in one body
or in events. Knows pieces and OpenAI's JSON; text.parsers finds the pieces."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from penstock.request import Delta
from penstock.server.openai.answer_objects import ChatMessage, MadeCall, MadeFunction, MessageDelta
from penstock.server.openai.answers import ChatAnswer
from penstock.server.openai.logprobs_json import TokenSpellings
from penstock.text.parsers.pieces import AnswerPiece, Reader

if TYPE_CHECKING:
    from penstock.server.openai.prompt_ids import TokenizedPrompt
    from penstock.server.openai.translate import Call

TOOL_CALLS = "tool_calls"  # finish_reason of an answer with tool calls


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class ReadChatAnswer(ChatAnswer):
    """The answer of /v1/chat/completions whose text a parser reads. Reasoning appears under vLLM's
    present field name and its older one."""

    only_text = False

    def __init__(self, call: Call, model: str, spellings: TokenSpellings) -> None:
        super().__init__(call, model, spellings)
        self._readers: dict[int, Reader] = {}  # choice -> its reader, once the choice has begun

    def _read(self, choice: int, delta: Delta) -> list[AnswerPiece]:
        assert self._call.reader is not None, "who picked this answer has looked"
        reader = self._readers.get(choice)
        if reader is None:
            reader = self._readers[choice] = self._call.reader()
        pieces = reader.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += reader.end(stopped=delta.finish_reason == "stop")
        return [
            piece for piece in pieces if piece.kind != "reasoning" or self._call.include_reasoning
        ]

    def _content(self, choice: int, prompt: TokenizedPrompt, delta: Delta) -> ChatMessage:
        told = told_of(self._read(choice, delta), whole=True)
        return ChatMessage(**{"content": None if told else "", **told})

    def _shown(
        self, choice: int, delta: Delta, *, first: bool, needed: bool
    ) -> MessageDelta | None:
        told = told_of(self._read(choice, delta), whole=False)
        if not told and not needed:
            return None
        return MessageDelta(**({"role": "assistant", "content": ""} if first else {}) | told)

    def _finish(self, choice: int, delta: Delta) -> str | None:
        reader = self._readers.get(choice)
        called = reader is not None and reader.called
        return TOOL_CALLS if called and delta.finish_reason == "stop" else delta.finish_reason


def told_of(pieces: Sequence[AnswerPiece], *, whole: bool) -> dict[str, Any]:
    """Returns the fields of a message (if `whole`), or of an event's delta, for these pieces.
    Leaves out empty fields."""
    texts: dict[str, list[str]] = {}
    calls: dict[int, MadeCall] = {}
    arguments: dict[int, list[str]] = {}
    for piece in pieces:
        if piece.kind == "name":
            calls[piece.call] = MadeCall(
                index=UNSET if whole else piece.call,
                id=new_call_id(),
                type="function",
                function=MadeFunction(piece.text),
            )
            arguments[piece.call] = []
        elif piece.kind == "arguments":
            calls.setdefault(piece.call, MadeCall(index=piece.call, function=MadeFunction()))
            arguments.setdefault(piece.call, []).append(piece.text)
        else:
            texts.setdefault(piece.kind, []).append(piece.text)
    told: dict[str, Any] = {kind: "".join(parts) for kind, parts in texts.items()}
    if "reasoning" in told:
        told["reasoning_content"] = told["reasoning"]
    for at, call in calls.items():
        call.function.arguments = "".join(arguments[at])
    return {**told, "tool_calls": list(calls.values())} if calls else told
