"""Builds the output items of /v1/responses. Collects an answer's pieces into reasoning, messages
and calls, and makes the events that report each item as it grows. Knows pieces and OpenAI's names;
no tokens, no encoding."""

from __future__ import annotations

import uuid
from typing import Any

from penstock.server.openai.read_answers import new_call_id
from penstock.text.parsers.pieces import AnswerPiece

Json = dict[str, Any]
Event = tuple[str, Json]  # type without its prefix `response.`, and fields


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class OutputItems:
    """The output items of one answer in order. The last item stays open and grows until a piece of
    another kind comes, or `close` is called."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self._open: Json | None = None
        self._call = -1
        self._texts: list[str] = []  # pieces of the open item's text

    def take(self, piece: AnswerPiece) -> list[Event]:
        """Adds a piece of the answer. Returns its events."""
        kind = {"reasoning": "reasoning", "content": "message"}.get(piece.kind, "function_call")
        events: list[Event] = []
        if self._open is None or self._open["type"] != kind or piece.kind == "name":
            events += self.close("completed")
            events += self._begin(kind, piece)
        if piece.kind == "name" or not piece.text:
            return events
        self._texts.append(piece.text)
        name, more = self._growing()
        return [*events, (f"{name}.delta", {**self._place(), **more, "delta": piece.text})]

    def close(self, status: str) -> list[Event]:
        """Ends the open item with `status`. Returns its events."""
        item, text = self._open, "".join(self._texts)
        if item is None:
            return []
        place, (name, more) = self._place(), self._growing()
        item["status"] = status
        events: list[Event] = []
        if item["type"] == "function_call":
            item["arguments"] = text
            events.append((f"{name}.done", {**place, "name": item["name"], "arguments": text}))
        else:
            part = _part(item["type"], text)
            item["content"] = [part]
            events.append((f"{name}.done", {**place, **more, "text": text}))
            events.append(("content_part.done", {**place, "content_index": 0, "part": part}))
        self._open = None
        return [*events, ("output_item.done", {"output_index": len(self.items) - 1, "item": item})]

    def _begin(self, kind: str, piece: AnswerPiece) -> list[Event]:
        prefix = {"function_call": "fc", "message": "msg", "reasoning": "rs"}[kind]
        item: Json = {"id": new_id(prefix), "type": kind, "status": "in_progress"}
        if kind == "function_call":
            item |= {"call_id": new_call_id(), "name": piece.text, "arguments": ""}
        else:
            item |= (
                {"role": "assistant", "content": []}
                if kind == "message"
                else {"summary": [], "content": []}
            )
        self._open, self._texts = item, []
        self.items.append(item)
        events: list[Event] = [
            ("output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)})
        ]
        if kind != "function_call":
            events.append(
                (
                    "content_part.added",
                    {**self._place(), "content_index": 0, "part": _part(kind, "")},
                )
            )
        return events

    def _place(self) -> Json:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.items) - 1}

    def _growing(self) -> tuple[str, Json]:
        """Returns the name of the open item's events, and fields that all of them have."""
        assert self._open is not None
        if self._open["type"] == "function_call":
            return "function_call_arguments", {}
        if self._open["type"] == "reasoning":
            return "reasoning_text", {"content_index": 0}
        return "output_text", {"content_index": 0, "logprobs": []}


def _part(kind: str, text: str) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
