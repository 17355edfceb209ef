"""Multipart bodies: parts to fields and one file, which goes to the disk as it comes. Nothing of it is held.

It knows HTTP's form and the file store's drafts; not what the fields mean. Parsing is python-multipart's (RFC 7578).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from penstock.server.batch.file_store import ContentDraft
from penstock.server.online.intake import TRY_AGAIN
from penstock.server.openai.http_errors import HttpError

MOST_PARTS = 16
LONGEST_FIELD = 1024  # bytes of a part that is no file
LONGEST_NAME = 255  # characters of a file's name that are kept
WRITE_BYTES = 64 * 1024  # of a file that gather before they are written: about what a slow upload holds


@dataclass(slots=True)
class Upload:
    """What came: `fields` by name, the file's name. Its content is in the draft."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


class _Form:
    """What the parser has found; it doesn't know the parser: two that held each other would hold what is pending until
    the garbage collector comes, and that comes seldom."""

    def __init__(self, max_bytes: int) -> None:
        self.upload = Upload()
        self.pending = bytearray()
        self.over = False
        self._max_bytes, self._size = max_bytes, 0
        self._parts = 0
        self._name, self._data = "", bytearray()  # of the part that comes
        self._headers: dict[bytes, bytes] = {}
        self._header, self._value = bytearray(), bytearray()

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._take,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise HttpError(f"the form has more than {MOST_PARTS} parts: send a file and its purpose")
        self._headers.clear()

    def _end_header(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if kind != b"form-data" or b"name" not in options:
            raise _malformed()
        name = options[b"name"].decode("utf-8", "replace")
        filename = options.get(b"filename")
        if name == "file" and filename is None:
            raise HttpError("file must be a file of the form, with a filename", param="file")
        if (name == "file" and self.upload.filename is not None) or name in self.upload.fields:
            raise HttpError("a part of the form is there twice: send each once", param=name[:80])
        self._name = name
        if name == "file" and filename is not None:
            self.upload.filename = _clean(filename.decode("utf-8", "replace"))

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._size += end - start
            if self._size > self._max_bytes:
                raise too_large(self._max_bytes)
            self.pending += data[start:end]
            return
        self._data += data[start:end]
        if len(self._data) > LONGEST_FIELD:
            raise HttpError(f"a field of the form has more than {LONGEST_FIELD} bytes", param=self._name[:80])

    def _end(self) -> None:
        if self._name != "file":
            self.upload.fields[self._name] = self._data.decode("utf-8", "replace")
        self._data.clear()

    def _finish(self) -> None:
        self.over = True


class UploadParser:
    """Takes a body piece by piece; what belongs to the file gathers until it is taken."""

    def __init__(self, content_type: str, max_bytes: int) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise HttpError("the body must be multipart/form-data with a file and its purpose")
        self._form = _Form(max_bytes)
        try:
            self._parser = MultipartParser(boundary, self._form.callbacks(), max_header_count=8, max_header_size=2048)
        except FormParserError as error:
            raise _malformed() from error

    def write(self, data: bytes) -> None:
        """Raises HttpError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed() from error

    @property
    def pending(self) -> int:
        """Bytes of the file that have gathered."""
        return len(self._form.pending)

    def take(self) -> bytes:
        """What has gathered."""
        data, self._form.pending = bytes(self._form.pending), bytearray()
        return data

    def end(self) -> Upload:
        """After the last piece. Raises HttpError where parts are missing."""
        if not self._form.over:
            raise _malformed()
        return self._form.upload


@contextlib.contextmanager
def one_more(uploads: Counter[str], owner: str, most: int) -> Iterator[None]:
    """Counts an upload as long as it is on its way: each holds memory, and its draft room on the disk. Raises
    HttpError."""
    if uploads[owner] >= most:
        message = f"{most} uploads of yours are on their way, and no more are taken at once: wait for one to end"
        raise HttpError(message, status=429, code="too_many_uploads", headers={"retry-after": str(TRY_AGAIN)})
    uploads[owner] += 1
    try:
        yield
    finally:
        uploads[owner] -= 1


async def receive(
    body: AsyncIterator[bytes],
    parser: UploadParser,
    draft: ContentDraft,
    off_loop: Callable[[Callable[[bytes], None], bytes], Awaitable[None]],
) -> Upload:
    """Reads a body to its end; the file's content goes into the draft WRITE_BYTES at a time. Raises HttpError."""
    async for piece in body:
        parser.write(piece)
        if parser.pending >= WRITE_BYTES:
            await off_loop(draft.write, parser.take())
    upload = parser.end()
    if parser.pending:
        await off_loop(draft.write, parser.take())
    return upload


def too_large(max_bytes: int) -> HttpError:
    """Returns the error for a file of more bytes than are taken."""
    message = f"the file is larger than {max_bytes} bytes: part it"
    return HttpError(message, status=413, code="body_too_large", param="file")


def _malformed() -> HttpError:
    return HttpError("the body is no well-formed multipart/form-data: send a file and its purpose")


def _clean(filename: str) -> str:
    """A name for showing: no path, no control characters, of bounded length. It never becomes a path here."""
    name = filename.replace("\\", "/").rsplit("/", 1)[-1]
    return "".join(letter for letter in name if letter.isprintable())[-LONGEST_NAME:]
