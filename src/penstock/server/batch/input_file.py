"""Reads and checks a batch's input lines. Lines are read as bytes and checked one by one; bad ones
are reported by number.

Only `\\n` ends a line. Line numbers count from 1 and include blank lines, which are skipped. A
check takes 16 to 32 bytes of memory per custom_id. Checking a file again gives the same results; a
custom_id belongs to the first line that has it, good or bad. Knows the bodies of completions and
chats; no engine, no database, no tokens. Source of the file format: OpenAI's "Batch API" guide.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.key_set import KeySet
from penstock.server.batch.batch_limits import BatchJobLimits
from penstock.server.batch.database import BatchError
from penstock.server.batch.file_store import close_behind, open_content
from penstock.server.openai.batch_line import (
    BatchLine,
    LineError,
    LineNumbers,
    PlainLine,
    check_id,
    parse_line,
    read_request,
)
from penstock.server.openai.forms import ChatForm, CompletionForm
from penstock.server.openai.http_errors import HttpError, check_model
from penstock.server.openai.http_limits import LONG_BODY

if TYPE_CHECKING:
    from penstock.engine.build_engine import EngineFacts

# most lines read at a time, since lines of two bytes take fifty times their size in memory
READ_LINES = 4_096
SLICE = 0.002  # seconds of checking in one turn of the event loop
LONGEST_MESSAGE = 300  # most characters of the error message about one line
# most spans of bad lines' numbers; of further ones only the count and the last number are kept
MOST_SPANS = 1_000
_BOM = b"\xef\xbb\xbf"


class _Named(msgspec.Struct):
    """The one field of a bad line that is read to report its errors by custom_id."""

    custom_id: str


@dataclass(slots=True)
class InputSurvey:
    """Result of checking a whole file. lines, good: numbers of all lines and of good ones. errors:
    OpenAI's error objects in the order of the lines."""

    lines: int = 0
    good: int = 0
    errors: list[BatchError] = field(default_factory=list)


_names = msgspec.json.Decoder(_Named)


def _name_in(line: bytes) -> str | None:
    """Returns the custom_id of a bad line, or None if it has none."""
    try:
        return _names.decode(line).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


async def read_lines(path: Path, limits: BatchJobLimits) -> AsyncIterator[tuple[int, bytes]]:
    """Yields (number, line without its newline) for each line that isn't blank. Reads in a thread,
    some lines at a time. A too long line is cut one byte past the limit. Raises OSError,
    FileDamagedError."""
    file = await asyncio.to_thread(_opened, path)
    try:
        last = 0
        while lines := await asyncio.to_thread(_some_lines, file, last, limits):
            for line in lines:
                yield line
            last = lines[-1][0]
    finally:
        close_behind(file)


def _opened(path: Path) -> BufferedReader:
    """Opens a file and skips its byte order mark, if any, so that it doesn't count as part of the
    first line."""
    file = open_content(path)
    try:
        if file.read(len(_BOM)) != _BOM:
            file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _some_lines(file: BufferedReader, last: int, limits: BatchJobLimits) -> list[tuple[int, bytes]]:
    """Reads the next lines that aren't blank, with their numbers: about limits.read_bytes in total,
    and at most READ_LINES lines. Returns an empty list at the file's end. last: number of the
    previous line."""
    lines: list[tuple[int, bytes]] = []
    size, longest = 0, limits.max_line_bytes
    while (
        size < limits.read_bytes
        and len(lines) < READ_LINES
        and (line := file.readline(longest + 2))
    ):
        last += 1
        blank = line.isspace()
        if len(line) == longest + 2 and not line.endswith(b"\n"):
            line = line[: longest + 1]
            while rest := file.readline(limits.read_bytes):
                blank = blank and rest.isspace()
                if rest.endswith(b"\n"):
                    break
        if not blank:
            size += len(line)
            lines.append((last, line.removesuffix(b"\n")))
        else:
            last += _skip_blank(file)
    return lines


def _skip_blank(file: BufferedReader) -> int:
    """Skips blank lines as far as the read buffer reaches, and returns their number. A file may be
    full of them, and reading them one by one would take minutes."""
    ahead = file.peek()
    blank = len(ahead) - len(ahead.lstrip())
    end = ahead.rfind(b"\n", 0, blank) + 1
    file.read(end)
    return ahead.count(b"\n", 0, end)


class LineCheck:
    """Checks each line of one batch's file once, in order. endpoint: the batch's endpoint. model:
    served name of the batch's model."""

    def __init__(
        self, endpoint: str, model: str, facts: EngineFacts, limits: BatchJobLimits
    ) -> None:
        self._endpoint, self._model, self._facts, self._limits = endpoint, model, facts, limits
        self._taken = KeySet()

    def line(self, data: bytes) -> BatchLine:
        """Parses and checks a line. Raises LineError if it cannot be run."""
        if len(data) > self._limits.max_line_bytes:
            raise LineError(
                f"the line is longer than {self._limits.max_line_bytes} bytes", code="line_too_long"
            )
        try:
            line = parse_line(data)
        except LineError as error:
            name = _name_in(data)
            if name is not None and self._take(name) is None:
                error.custom_id = name
            raise
        fault = self._take(line.custom_id)
        if fault is not None:
            raise fault
        try:
            self._request(line)
        except LineError as error:
            error.custom_id = line.custom_id
            raise
        return line

    def _take(self, custom_id: str) -> LineError | None:
        """Assigns a custom_id to the present line. Returns the error if it is invalid or an earlier
        line has it."""
        try:
            check_id(custom_id)
        except LineError as error:
            return error
        if not self._taken.add(custom_id):
            message = "an earlier line has this custom_id: give every line its own"
            return LineError(message, code="duplicate_custom_id", param="custom_id")
        return None

    def _request(self, line: BatchLine) -> None:
        if line.method == "POST" and line.url != self._endpoint:
            message = f"url must be the batch's endpoint, {self._endpoint}"
            raise LineError(message, code="mismatched_endpoint", param="url")
        read_request(
            line, self._facts, self._check_any if isinstance(line, PlainLine) else self._check_model
        )

    def _check_any(self, form: CompletionForm | ChatForm) -> None:
        """Raises HttpError if the body names another model than the batch's."""
        check_model(form.model, self._model)

    def _check_model(self, form: CompletionForm | ChatForm) -> None:
        """Raises HttpError if the body names no model, or another one than the batch's."""
        if form.model is None:
            raise HttpError("model is missing", param="model", code="missing_required_parameter")
        self._check_any(form)


async def verdicts(
    path: Path, check: LineCheck, limits: BatchJobLimits
) -> AsyncIterator[tuple[int, BatchLine | LineError]]:
    """Yields (number, the line or its error) for every line. Lets the event loop run in between,
    and checks long lines in a thread. Raises OSError."""
    turn = time.perf_counter()
    async for number, data in read_lines(path, limits):
        if len(data) > LONG_BODY:
            yield number, await asyncio.to_thread(_verdict, check, data)
        else:
            yield number, _verdict(check, data)
        if time.perf_counter() - turn > SLICE:
            await asyncio.sleep(0)
            turn = time.perf_counter()


def _verdict(check: LineCheck, data: bytes) -> BatchLine | LineError:
    try:
        return check.line(data)
    except LineError as error:
        return _without_frames(error)


def _without_frames(error: LineError) -> LineError:
    """Removes the tracebacks of an error and of its causes, and returns the error. Their frames
    refer to the error; this reference cycle would keep the whole check in memory until the garbage
    collector runs, which is rare.
    """
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__context__
    return error


async def survey(path: Path, check: LineCheck, limits: BatchJobLimits) -> InputSurvey:
    """Checks every line of an input file. Raises OSError."""
    found = InputSurvey()
    told_bytes = 0
    beyond = LineNumbers(MOST_SPANS)  # numbers of the bad lines that are not listed in full
    async for number, verdict in verdicts(path, check, limits):
        found.lines += 1
        if found.lines > limits.max_lines:
            message = f"the file has more than {limits.max_lines} requests: part it"
            return InputSurvey(errors=[_error(LineError(message, code="too_many_requests"), None)])
        if isinstance(verdict, BatchLine):
            found.good += 1
        elif len(found.errors) < limits.max_errors and told_bytes < limits.max_error_bytes:
            found.errors.append(_error(verdict, number))
            told_bytes += len(json.dumps(msgspec.to_builtins(found.errors[-1])))
        else:
            beyond.add(number)
    if not found.lines:
        found.errors = [_error(LineError("the file holds no request", code="empty_file"), None)]
    if beyond:
        message = f"more lines are bad, {len(beyond)} of them: {beyond}"
        found.errors.append(
            _error(LineError(message, code="more_errors"), beyond.first, len(message))
        )
    return found


def told(error: LineError, longest: int = LONGEST_MESSAGE) -> str:
    """Returns the message of a line's error, cut to `longest` characters."""
    message = str(error)
    return message if len(message) <= longest else message[: longest - 3] + "..."


def _error(error: LineError, number: int | None, longest: int = LONGEST_MESSAGE) -> BatchError:
    message = told(error, longest)
    return BatchError(code=error.code, line=number, message=message, param=error.param)
