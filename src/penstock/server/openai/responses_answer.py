"""The answers of /v1/responses. They are one body, or OpenAI's events in order. Knows a call,
output items and JSON; no HTTP.

The first events are created and in_progress. Each output item has events from output_item.added to
output_item.done. The last event is completed, or incomplete if max_output_tokens or the context's
length cut the answer, or error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from penstock.errors import PenstockError
from penstock.request import Delta, PositionLogprobs
from penstock.server.openai.answer_objects import (
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    Response,
    ResponseEvent,
    ResponseUsage,
    Status,
    TokenCounts,
)
from penstock.server.openai.answers import BaseAnswer
from penstock.server.openai.http_errors import fields_of
from penstock.server.openai.logprobs_json import TokenSpellings
from penstock.server.openai.output_items import Event, OutputItems
from penstock.text.parsers.parser_registry import AnswerReader
from penstock.text.parsers.pieces import AnswerPiece, Reader

if TYPE_CHECKING:
    from penstock.server.openai.translate import Call

_encode = msgspec.json.Encoder().encode


class ResponsesAnswer(BaseAnswer):
    """The answer of /v1/responses, for one sample."""

    prefix = "resp"

    def __init__(self, call: Call, model: str, spellings: TokenSpellings) -> None:
        super().__init__(call, model, spellings)
        self.id = self.id.replace("-", "_", 1)
        self._items = OutputItems()
        self._reader: Reader = call.reader() if call.reader is not None else AnswerReader()
        self._tokens: list[int] = []
        self._number = 0  # sequence number of the next event
        self._status: Status = "in_progress"
        self._why = ""  # reason why the answer is incomplete
        # version of the weights, if they were updated while serving
        self._weights: str | UnsetType = UNSET

    def choice(
        self, choice: int, delta: Delta, positions: Sequence[PositionLogprobs | None] | None
    ) -> bytes:
        """Returns the JSON of all output items from the sample's only delta."""
        self._take(delta)
        return _encode(self._items.items)

    def body(self, choices: list[bytes], usage: TokenCounts) -> list[bytes]:
        """Returns the whole response as JSON."""
        return [_encode(self._response(output=msgspec.Raw(choices[0]), usage=self._counts(usage)))]

    def event(
        self, choice: int, delta: Delta, positions: Sequence[PositionLogprobs | None] | None
    ) -> bytes:
        """Returns the events to send for one delta."""
        begin: list[Event] = []
        if not self._number:
            begin = [
                ("created", {"response": self._response()}),
                ("in_progress", {"response": self._response()}),
            ]
        return self._told([*begin, *self._take(delta)])

    def last(self, usage: TokenCounts) -> bytes:
        """Returns the last event, which has the whole response."""
        whole = self._response(output=self._items.items, usage=self._counts(usage))
        return self._told([(self._status, {"response": whole})])

    def error_event(self, error: PenstockError) -> bytes:
        """Returns the last event of a response that ends in an error."""
        told = fields_of(error)
        return self._event_bytes(
            "error", {"code": told.code, "message": told.message, "param": told.param}
        )

    def _take(self, delta: Delta) -> list[Event]:
        self._tokens += delta.token_ids
        pieces = self._reader.feed(delta.text)
        ended = delta.finish_reason is not None
        if ended:
            pieces += self._reader.end(stopped=delta.finish_reason == "stop")
        events = [event for piece in pieces for event in self._items.take(piece)]
        if ended:
            # adds an empty message, so that the client can send the output back in its next request
            if not self._items.items:
                events += self._items.take(AnswerPiece("content", ""))
            if delta.weights_version is not None:
                self._weights = delta.weights_version
            self._status = "completed" if delta.finish_reason == "stop" else "incomplete"
            self._why = "abort" if delta.finish_reason == "abort" else "max_output_tokens"
            events += self._items.close(self._status)
        return events

    def _response(self, **end: Any) -> Response:
        """Returns the response object. end: its output and token counts, once there are some."""
        sampling, cut = self._call.sampling, self._status == "incomplete"
        return Response(
            id=self.id,
            created_at=self.created,
            status=self._status,
            incomplete_details=IncompleteDetails(self._why) if cut else None,
            model=self.model,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            weights_version=self._weights,
            **(self._call.asked or {}),
            **end,
        )

    def _counts(self, usage: TokenCounts) -> ResponseUsage:
        thought = 0
        if self._tokenizer is not None and (end := self._reader.thought_length):
            skip = self._call.sampling.skip_special_tokens
            thought = self._tokenizer.tokens_until(self._tokens, end, skip_special_tokens=skip)
        assert usage.prompt_tokens_details is not UNSET
        return ResponseUsage(
            usage.prompt_tokens,
            InputDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputDetails(thought),
            usage.total_tokens,
        )

    def _told(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._event_bytes(f"response.{name}", said) for name, said in events)

    def _event_bytes(self, kind: str, said: dict[str, Any]) -> bytes:
        data = _encode(ResponseEvent(type=kind, sequence_number=self._number, **said))
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
