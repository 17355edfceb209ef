"""The lines of a batch's input: read as bytes, checked one by one, all bad ones told with their numbers.

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}

A line ends at `\\n` and nowhere else (U+2028 in a text is text); numbers count from 1, blank lines too, which are
skipped. A file of any size is read in constant memory: 16 to 32 bytes a custom_id. It knows the two routes' forms; no
engine, no database, and no tokens: a prompt that is too long shows when it is run. Source of the form: OpenAI's
"Batch API" guide.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from penstock.errors import PenstockError, UsageError
from penstock.journal import KeySet
from penstock.server.forms import ChatForm, CompletionForm, read_chat, read_completion
from penstock.server.translate import check_sampling

if TYPE_CHECKING:
    from penstock.engine.open import EngineFacts

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDPOINTS = (CHAT, COMPLETIONS)
READ_BYTES = 1 << 20  # read from the disk at a time
SLICE = 0.002  # seconds of checking in one turn of the loop
LONGEST_ID = 512  # characters of a custom_id
LONGEST_MESSAGE = 300  # characters of what is said of one line
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Of one input file. max_line_bytes: also what a body over HTTP may have, by limits.Limits' default."""

    max_lines: int = 50_000
    max_file_bytes: int = 200_000_000
    max_line_bytes: int = 32 * 1024 * 1024
    max_errors: int = 1_000  # told in full; of those beyond, the numbers alone


class LineError(UsageError):
    """A line that cannot be run; `code` is OpenAI's where it has one."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.code = code


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line, its body not yet read."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw

    def form(self) -> CompletionForm | ChatForm:
        """The body's form. Raises HttpError."""
        return (read_completion if self.url == COMPLETIONS else read_chat)(bytes(self.body))


@dataclass(slots=True)
class Survey:
    """What the check of a whole file found. errors: OpenAI's objects, in the order of the lines."""

    lines: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)


_decoder = msgspec.json.Decoder(Line)


def parse_line(line: bytes) -> Line:
    """Raises LineError."""
    try:
        return _decoder.decode(line)
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "")
        code = "missing_required_parameter" if "missing required field" in reason else "invalid_request"
        raise LineError(f"the line's form is not a request's: {reason}", code=code) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineError("the line is not valid JSON", code="invalid_json_line") from error


async def read_lines(path: Path, limits: BatchLimits) -> AsyncIterator[tuple[int, bytes]]:
    """(number, line without its end) of the lines that hold anything; read in a thread, some at a time. A line that is
    too long comes cut, one byte past the limit. Raises OSError."""
    file = await asyncio.to_thread(_opened, path)
    try:
        number = 0
        while lines := await asyncio.to_thread(_some_lines, file, limits.max_line_bytes):
            for line in lines:
                number += 1
                if line.strip():
                    yield number, line
    finally:
        file.close()


def _opened(path: Path) -> BinaryIO:
    """A file behind the mark that some editors begin one with: it counts for no line's length."""
    file = path.open("rb")
    try:
        if file.read(len(_BOM)) != _BOM:
            file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _some_lines(file: BinaryIO, longest: int) -> list[bytes]:
    """The next lines of about READ_BYTES together."""
    lines: list[bytes] = []
    size = 0
    while size < READ_BYTES and (line := file.readline(longest + 2)):
        if len(line) == longest + 2 and not line.endswith(b"\n"):
            line = line[: longest + 1]
            while (rest := file.readline(READ_BYTES)) and not rest.endswith(b"\n"):
                pass
        size += len(line)
        lines.append(line.removesuffix(b"\n"))
    return lines


class Check:
    """What makes a line of one batch good: `endpoint` is the batch's, `model` the server's name of its model."""

    def __init__(self, endpoint: str, model: str, facts: EngineFacts, limits: BatchLimits) -> None:
        self._endpoint, self._model, self._facts, self._limits = endpoint, model, facts, limits
        self._seen = KeySet()

    def line(self, line: bytes) -> None:
        """Raises LineError."""
        if len(line) > self._limits.max_line_bytes:
            raise LineError(f"the line is longer than {self._limits.max_line_bytes} bytes", code="line_too_long")
        known = parse_line(line)
        if not 0 < len(known.custom_id) <= LONGEST_ID:
            message = f"custom_id must have 1 to {LONGEST_ID} characters"
            raise LineError(message, code="invalid_custom_id", param="custom_id")
        if known.method != "POST":
            raise LineError("method must be POST", code="invalid_method", param="method")
        if known.url != self._endpoint:
            message = f"url must be the batch's endpoint, {self._endpoint}"
            raise LineError(message, code="mismatched_endpoint", param="url")
        self._body(known)
        if not self._seen.add(known.custom_id):
            message = "an earlier line has this custom_id: give every line its own"
            raise LineError(message, code="duplicate_custom_id", param="custom_id")

    def _body(self, known: Line) -> None:
        try:
            form = known.form()
            check_sampling(form, self._facts)
        except PenstockError as error:
            param = None if error.param is None else f"body.{error.param}"
            code = getattr(error, "code", None) or "invalid_request"
            raise LineError(str(error), code=code, param=param) from error
        if form.model is None:
            raise LineError("body.model is missing", code="missing_required_parameter", param="body.model")
        if form.model != self._model:
            message = f"the model asked for is not served here; this server has {self._model}"
            raise LineError(message, code="model_not_found", param="body.model")
        if form.stream:
            message = "stream is not served in a batch: leave it out"
            raise LineError(message, code="unsupported_parameter", param="body.stream")


async def survey(path: Path, check: Check, limits: BatchLimits) -> Survey:
    """Checks every line, a little in each turn of the loop. Raises OSError."""
    found = Survey()
    beyond: list[int] = []  # bad lines past those told in full
    turn = time.perf_counter()
    async for number, line in read_lines(path, limits):
        found.lines += 1
        if found.lines > limits.max_lines:
            message = f"the file has more than {limits.max_lines} requests: part it"
            found.errors = [_error(LineError(message, code="too_many_requests"), None)]
            return found
        try:
            check.line(line)
        except LineError as error:
            if len(found.errors) < limits.max_errors:
                found.errors.append(_error(error, number))
            else:
                beyond.append(number)
        if time.perf_counter() - turn > SLICE:
            await asyncio.sleep(0)
            turn = time.perf_counter()
    if not found.lines:
        found.errors = [_error(LineError("the file holds no request", code="empty_file"), None)]
    if beyond:
        message = f"more lines are bad, {len(beyond)} of them: {_ranges(beyond)}"
        found.errors.append(_error(LineError(message, code="more_errors"), beyond[0], len(message)))
    return found


def _error(error: LineError, number: int | None, longest: int = LONGEST_MESSAGE) -> dict[str, Any]:
    message = str(error)
    if len(message) > longest:
        message = message[: longest - 3] + "..."
    return {"code": error.code, "line": number, "message": message, "param": error.param}


def _ranges(numbers: list[int]) -> str:
    """1-3, 7, 9-12: numbers in growing order."""
    parts = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        parts.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ", ".join(parts)
