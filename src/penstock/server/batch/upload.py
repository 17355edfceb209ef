"""Parses multipart bodies with one file. Splits them into fields and the file, whose bytes can be
taken as they arrive. Knows multipart/form-data (RFC 7578; python-multipart does the parsing); not
what the fields mean, and no disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from penstock.server.openai.http_errors import HttpError

MOST_PARTS = 16
LONGEST_FIELD = 1024  # most bytes of a form field that is no file
LONGEST_NAME = 255  # most characters kept of a file's name


class UploadParser:
    """Parses a body piece by piece. fields: values of the plain fields by name. filename: the
    file's name, or None. pending: bytes of the file that wait for `take`. Call `close` at the end:
    the parser and this object refer to each other, and would keep the pending bytes in memory."""

    def __init__(self, content_type: str, max_bytes: int) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise HttpError("the body must be multipart/form-data with a file and its purpose")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.pending = bytearray()
        self._max_bytes, self._size = max_bytes, 0
        self._parts, self._over = 0, False
        self._name, self._data = "", bytearray()  # name and data of the part being received
        self._headers: dict[bytes, bytes] = {}
        self._header, self._value = bytearray(), bytearray()
        callbacks: Any = {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._take,
            "on_part_end": self._end,
            "on_end": self._finish,
        }
        with _well_formed():
            self._parser = MultipartParser(
                boundary, callbacks, max_header_count=8, max_header_size=2048
            )

    def write(self, data: bytes) -> None:
        """Parses a piece of the upload's body. Raises HttpError."""
        with _well_formed():
            self._parser.write(data)

    def take(self, most: int) -> bytes:
        """Returns at most `most` of the pending bytes of the file."""
        data = bytes(self.pending[:most])
        del self.pending[:most]
        return data

    def end(self) -> UploadParser:
        """Returns itself after the last piece. Raises HttpError if the body is incomplete."""
        if not self._over:
            raise _malformed()
        return self

    def close(self) -> None:
        del self._parser

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise HttpError(
                f"the form has more than {MOST_PARTS} parts: send a file and its purpose"
            )
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
        if (name == "file" and self.filename is not None) or name in self.fields:
            raise HttpError("a part of the form is there twice: send each once", param=name[:80])
        self._name = name
        if name == "file" and filename is not None:
            self.filename = _clean(filename.decode("utf-8", "replace"))

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._size += end - start
            if self._size > self._max_bytes:
                raise too_large(self._max_bytes)
            self.pending += data[start:end]
            return
        self._data += data[start:end]
        if len(self._data) > LONGEST_FIELD:
            raise HttpError(
                f"a field of the form has more than {LONGEST_FIELD} bytes", param=self._name[:80]
            )

    def _end(self) -> None:
        if self._name != "file":
            self.fields[self._name] = self._data.decode("utf-8", "replace")
        self._data.clear()

    def _finish(self) -> None:
        self._over = True


@contextlib.contextmanager
def _well_formed() -> Iterator[None]:
    try:
        yield
    except FormParserError as error:
        raise _malformed() from error


def too_large(max_bytes: int) -> HttpError:
    """Returns the error for a file above the size limit."""
    message = f"the file is larger than {max_bytes} bytes: part it"
    return HttpError(message, status=413, code="body_too_large", param="file")


def _malformed() -> HttpError:
    return HttpError("the body is no well-formed multipart/form-data: send a file and its purpose")


def _clean(filename: str) -> str:
    """Returns a file name for display, without path and control characters, and with limited
    length. It is never used as a path."""
    name = filename.replace("\\", "/").rsplit("/", 1)[-1]
    return "".join(letter for letter in name if letter.isprintable())[-LONGEST_NAME:]
