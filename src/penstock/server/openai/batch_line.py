"""Parses request lines of batches. Used for batches on a server, /v1/bulk and `penstock run`. Also
prints line numbers in short: 1-3, 7, 9-12. A line has OpenAI's envelope, or is the body alone with
an id in it:

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
    {"custom_id": "a", "messages": [...]}        {"id": 7, "prompt": "..."}

Knows the bodies of completions and chats; no file, no engine. Knows no tokens either: a too long
prompt is found when the line runs. Source of the envelope: OpenAI's "Batch API" guide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.errors import PenstockError, UsageError
from penstock.request import SamplingParams
from penstock.server.openai.forms import (
    ChatForm,
    CompletionForm,
    read_chat,
    read_completion,
    reason_of,
)
from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.translate import SamplingFacts, read_sampling

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDPOINTS = (CHAT, COMPLETIONS)
LONGEST_ID = 512  # most characters of a custom_id


class LineError(HttpError):
    """Raised for a line that cannot be run. code: OpenAI's error code if there is one. custom_id:
    the line's id if it is valid and no other line has it. answer: the error that the online route
    gives for the body, if the body is wrong."""

    code: str

    def __init__(
        self,
        message: str,
        *,
        code: str,
        param: str | None = None,
        answer: PenstockError | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.custom_id: str | None = None
        self._answer = answer

    @property
    def answer(self) -> PenstockError:
        return self._answer or self


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """A line with an envelope, whose body is not parsed yet."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw

    def form(self) -> CompletionForm | ChatForm:
        """Parses the line's body. Raises HttpError."""
        return (read_completion if self.url == COMPLETIONS else read_chat)(bytes(self.body))


class PlainLine(BatchLine):
    """A line without an envelope. Its route follows from its fields,
    and the model may be left out."""


_decoder = msgspec.json.Decoder(BatchLine)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENVELOPE = frozenset(("method", "url", "body"))


def name_and_body(fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns a line's custom_id or id (None if it has none), and the fields of its body without
    the envelope."""
    name = fields.get("custom_id", fields.get("id"))
    if isinstance(fields.get("body"), dict) and fields.keys() - {"custom_id"} <= _ENVELOPE:
        return name, fields["body"]
    left_out = "custom_id" if "custom_id" in fields else "id"
    return name, {key: value for key, value in fields.items() if key != left_out}


def _plain_line(line: bytes) -> PlainLine | None:
    """Parses a line without an envelope. Returns None if it isn't one."""
    try:
        fields = _fields.decode(line)
        name, body = name_and_body(fields)
        kind = str if "custom_id" in fields else str | int
        custom_id = None if name is None else msgspec.json.decode(name, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if custom_id is None or not _ENVELOPE.isdisjoint(body):
        return None
    url = CHAT if "messages" in body else COMPLETIONS if "prompt" in body else None
    if url is None:
        return None
    return PlainLine(str(custom_id), "POST", url, msgspec.Raw(msgspec.json.encode(body)))


def parse_line(line: bytes) -> BatchLine:
    """Parses a line, but not its body. Raises LineError."""
    try:
        return _decoder.decode(line)
    except msgspec.ValidationError as error:
        if (plain := _plain_line(line)) is not None:
            return plain
        reason = str(error).replace("`", "")
        code = (
            "missing_required_parameter"
            if "missing required field" in reason
            else "invalid_request"
        )
        raise LineError(f"the line's form is not a request's: {reason}", code=code) from error
    except RecursionError as error:
        raise LineError(
            "the line is nested too deep: flatten it", code="invalid_json_line"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LineError(
            f"the line is not valid JSON: {reason_of(error)}", code="invalid_json_line"
        ) from error


def check_id(custom_id: str) -> None:
    """Raises LineError for an invalid custom_id."""
    if not 0 < len(custom_id) <= LONGEST_ID:
        message = f"custom_id must have 1 to {LONGEST_ID} characters"
        raise LineError(message, code="invalid_custom_id", param="custom_id")


def read_request(
    line: BatchLine, facts: SamplingFacts, more: Callable[[CompletionForm | ChatForm], None]
) -> tuple[CompletionForm | ChatForm, SamplingParams]:
    """Parses the line's body. Returns it and its sampling parameters, with the model's defaults for
    missing ones. more: function with further checks of the body. Raises LineError."""
    if line.method != "POST":
        raise LineError("method must be POST", code="invalid_method", param="method")
    if line.url not in ENDPOINTS:
        raise LineError(f"url must be {COMPLETIONS} or {CHAT}", code="invalid_url", param="url")
    try:
        form = line.form()
        if form.stream:
            message = "stream is not served in a batch: leave it out"
            raise HttpError(message, param="stream", code="unsupported_parameter")
        more(form)
        return form, read_sampling(form, facts)
    except PenstockError as error:
        param = None if error.param is None else f"body.{error.param}"
        code = getattr(error, "code", None) or "invalid_request"
        raise LineError(str(error), code=code, param=param, answer=error) from error


# most spans of line numbers (3 MB); 50,000 lines of a batch make at most 25,000
MOST_SPANS = 25_000


class LineNumbers:
    """A growing list of numbers, stored as spans, so that a file in which every line is bad takes
    no more memory than one with a single bad line. Above `most` spans only the count and the last
    number are kept."""

    def __init__(self, most: int = MOST_SPANS) -> None:
        self._most = most
        self._spans: list[list[int]] = []  # first and last line number of each span
        self._size = self._untold = self._last = 0

    def __len__(self) -> int:
        return self._size

    @property
    def first(self) -> int:
        """The lowest number. There must be at least one."""
        return self._spans[0][0]

    def add(self, number: int) -> None:
        self._size += 1
        self._last = number
        if self._spans and number == self._spans[-1][1] + 1:
            self._spans[-1][1] = number
        elif len(self._spans) < self._most:
            self._spans.append([number, number])
        else:
            self._untold += 1

    def __str__(self) -> str:
        told = ", ".join(
            str(first) if first == last else f"{first}-{last}" for first, last in self._spans
        )
        return told + (f" and {self._untold} more up to {self._last}" if self._untold else "")


# bad rows that are listed in full (of further ones only the numbers); longest message of a row,
# characters
TOLD, LONGEST = 20, 500


class BadRows:
    """Collects input rows that cannot be run, to report all in one error."""

    def __init__(self) -> None:
        self._told, self._beyond = list[str](), LineNumbers()

    def add(self, number: int, message: str) -> None:
        """Adds a bad row. Row numbers must grow from call to call."""
        if len(self._told) < TOLD:
            self._told.append(
                message if len(message) <= LONGEST else message[: LONGEST - 3] + "..."
            )
        else:
            self._beyond.add(number)

    def refuse(self) -> None:
        """Raises UsageError if there are bad rows."""
        count = len(self._told) + len(self._beyond)
        many = (
            f"{count:,} rows are bad: mend them or take them out, none was run: "
            if count > 1
            else ""
        )
        rest = f"; and {len(self._beyond):,} more: {self._beyond}" if self._beyond else ""
        if count:
            raise UsageError(f"{many}{'; '.join(self._told)}{rest}")
