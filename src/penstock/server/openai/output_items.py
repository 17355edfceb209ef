"""Builds the output items of /v1/responses. Collects an answer's pieces into reasoning, messages
and calls, and makes the events that report each item as it grows. Knows pieces and OpenAI's names;
no tokens, no encoding."""

from __future__ import annotations

import uuid
from copy import copy
from typing import Any

from penstock.server.openai.answer_objects import ContentPart, ItemType, OutputItem, Status
from penstock.server.openai.read_answers import new_call_id
from penstock.text.parsers.pieces import AnswerPiece

# type without its prefix `response.`, and fields of ResponseEvent
Event = tuple[str, dict[str, Any]]


_KINDS: dict[str, ItemType] = {"reasoning": "reasoning", "content": "message"}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class OutputItems:
    """The output items of one answer in order. The last item stays open and grows until a piece of
    another kind comes, or `close` is called."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._texts: list[str] = []  # pieces of the open item's text

    def take(self, piece: AnswerPiece) -> list[Event]:
        """Adds a piece of the answer. Returns its events."""
        kind = _KINDS.get(piece.kind, "function_call")
        events: list[Event] = []
        if self._open is None or self._open.type != kind or piece.kind == "name":
            events += self.close("completed")
            events += self._begin(kind, piece)
        if piece.kind == "name" or not piece.text:
            return events
        self._texts.append(piece.text)
        name, more = self._growing()
        return [*events, (f"{name}.delta", {**self._place(), **more, "delta": piece.text})]

    def close(self, status: Status) -> list[Event]:
        """Ends the open item with `status`. Returns its events."""
        item, text = self._open, "".join(self._texts)
        if item is None:
            return []
        place, (name, more) = self._place(), self._growing()
        item.status = status
        events: list[Event] = []
        if item.type == "function_call":
            item.arguments = text
            events.append((f"{name}.done", {**place, "name": item.name, "arguments": text}))
        else:
            part = _part(item.type, text)
            item.content = [part]
            events.append((f"{name}.done", {**place, **more, "text": text}))
            events.append(("content_part.done", {**place, "content_index": 0, "part": part}))
        self._open = None
        return [*events, ("output_item.done", {"output_index": len(self.items) - 1, "item": item})]

    def _begin(self, kind: ItemType, piece: AnswerPiece) -> list[Event]:
        prefix = {"function_call": "fc", "message": "msg", "reasoning": "rs"}[kind]
        item = OutputItem(id=new_id(prefix), type=kind)
        if kind == "function_call":
            item.call_id, item.name, item.arguments = new_call_id(), piece.text, ""
        elif kind == "message":
            item.role, item.content = "assistant", []
        else:
            item.summary, item.content = [], []
        self._open, self._texts = item, []
        self.items.append(item)
        events: list[Event] = [
            ("output_item.added", {"output_index": len(self.items) - 1, "item": copy(item)})
        ]
        if kind != "function_call":
            events.append(
                (
                    "content_part.added",
                    {**self._place(), "content_index": 0, "part": _part(kind, "")},
                )
            )
        return events

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open.id, "output_index": len(self.items) - 1}

    def _growing(self) -> tuple[str, dict[str, Any]]:
        """Returns the name of the open item's events, and fields that all of them have."""
        assert self._open is not None
        if self._open.type == "function_call":
            return "function_call_arguments", {}
        if self._open.type == "reasoning":
            return "reasoning_text", {"content_index": 0}
        return "output_text", {"content_index": 0, "logprobs": []}


def _part(kind: ItemType, text: str) -> ContentPart:
    if kind == "reasoning":
        return ContentPart(type="reasoning_text", text=text)
    return ContentPart(type="output_text", text=text, annotations=[], logprobs=[])
