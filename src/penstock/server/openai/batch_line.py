"""Reads a line of work, for batches on a server (`penstock batch`), /v1/bulk and `penstock run`; and
writes many lines' numbers in one line: 1-3, 7, 9-12. A line is in OpenAI's envelope, or the body
alone with a name in it:

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}
    {"custom_id": "a", "messages": [...]}        {"id": 7, "prompt": "..."}

It knows the two routes' forms; no file, no engine, and no tokens: a prompt that is too long shows
when it is run. Source of the form: OpenAI's "Batch API" guide.
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
LONGEST_ID = 512  # characters of a custom_id


class LineError(HttpError):
    """A line that cannot be run; `code` is OpenAI's where it has one. custom_id: the line's, where
    it has one of its own. answer: what the route would say to the line's body, where that is what
    is bad."""

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
    """One line, its body not yet read."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw

    def form(self) -> CompletionForm | ChatForm:
        """Reads the body's form. Raises HttpError."""
        return (read_completion if self.url == COMPLETIONS else read_chat)(bytes(self.body))


class PlainLine(BatchLine):
    """A line without an envelope: its route follows from its fields, its model may be left out."""


_decoder = msgspec.json.Decoder(BatchLine)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENVELOPE = frozenset(("method", "url", "body"))


def name_and_body(fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns a line's name (None: it has none) and the fields of its body, without an envelope."""
    name = fields.get("custom_id", fields.get("id"))
    if isinstance(fields.get("body"), dict) and fields.keys() - {"custom_id"} <= _ENVELOPE:
        return name, fields["body"]
    left_out = "custom_id" if "custom_id" in fields else "id"
    return name, {key: value for key, value in fields.items() if key != left_out}


def _plain_line(line: bytes) -> PlainLine | None:
    """Reads a line whose body has no envelope; None where it is not such a line."""
    try:
        name, body = name_and_body(_fields.decode(line))
        custom_id = None if name is None else msgspec.json.decode(name, type=str | int)
    except msgspec.DecodeError:
        return None
    if custom_id is None or not _ENVELOPE.isdisjoint(body):
        return None
    url = CHAT if "messages" in body else COMPLETIONS if "prompt" in body else None
    if url is None:
        return None
    return PlainLine(str(custom_id), "POST", url, msgspec.Raw(msgspec.json.encode(body)))


def parse_line(line: bytes) -> BatchLine:
    """Reads a line but for its body. Raises LineError."""
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
    """Raises LineError."""
    if not 0 < len(custom_id) <= LONGEST_ID:
        message = f"custom_id must have 1 to {LONGEST_ID} characters"
        raise LineError(message, code="invalid_custom_id", param="custom_id")


def read_request(
    line: BatchLine, facts: SamplingFacts, more: Callable[[CompletionForm | ChatForm], None]
) -> tuple[CompletionForm | ChatForm, SamplingParams]:
    """Returns the line's form and its sampling, over the model's defaults. more: what else whoever
    runs it asks of a form. Raises LineError."""
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


MOST_SPANS = 25_000  # 3 MB; as many as the 50,000 lines of a batch can make


class LineNumbers:
    """Numbers that come in growing order, kept as spans: a file whose every line is bad costs no
    more memory than one with a single bad line. Past `most` spans, only their count and the last
    are told."""

    def __init__(self, most: int = MOST_SPANS) -> None:
        self._most = most
        self._spans: list[list[int]] = []  # first and last
        self._size = self._untold = self._last = 0

    def __len__(self) -> int:
        return self._size

    @property
    def first(self) -> int:
        """The lowest; there must be one."""
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


# bad rows told in full, of those beyond the numbers alone; characters of what is said of one
TOLD, LONGEST = (
    20,
    500,
)


class BadRows:
    """Rows that cannot be run, told together."""

    def __init__(self) -> None:
        self._told, self._beyond = list[str](), LineNumbers()

    def add(self, number: int, message: str) -> None:
        """Notes a row; numbers come in growing order."""
        if len(self._told) < TOLD:
            self._told.append(
                message if len(message) <= LONGEST else message[: LONGEST - 3] + "..."
            )
        else:
            self._beyond.add(number)

    def refuse(self) -> None:
        """Raises UsageError where there are any."""
        count = len(self._told) + len(self._beyond)
        many = (
            f"{count:,} rows are bad: mend them or take them out, none was run: "
            if count > 1
            else ""
        )
        rest = f"; and {len(self._beyond):,} more: {self._beyond}" if self._beyond else ""
        if count:
            raise UsageError(f"{many}{'; '.join(self._told)}{rest}")
