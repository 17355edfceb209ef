"""An HTTP client for OpenAI's files and batches. `penstock batch` uses it; any server with OpenAI's
API will do.

Knows HTTP and OpenAI's objects; no engine, and not how a server stores them. Every error is one
line.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

from penstock.errors import PenstockError, UsageError

PIECE = 1 << 20
ANSWER_SECONDS = 120.0  # seconds to wait for an answer, or for the next bytes of a file
LONGEST_ANSWER = 256 << 20  # most bytes of a JSON answer

Json = dict[str, Any]


class RemoteError(PenstockError):
    """An unexpected answer of a server; `status` is the HTTP status."""

    exit_code = 1

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NoAnswerError(RemoteError):
    """A server that cannot be reached, or whose answer broke off: it may be back later."""


class Remote:
    """One server. url: with or without /v1. Each request opens a new connection, so the server may
    restart between two requests."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname, parts.port
        except ValueError as error:
            raise UsageError(
                f"{url!r} is no address of a server: try http://127.0.0.1:8000", param="url"
            ) from error
        if parts.scheme not in ("http", "https") or not self._host or parts.query or parts.fragment:
            raise UsageError(
                f"{url!r} is no address of a server: try http://127.0.0.1:8000", param="url"
            )
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise UsageError("the API key must be printable ASCII", param="api_key")
        self.url = url
        self._safe = parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    # --- the server's files

    def upload(self, path: Path) -> Json:
        """Uploads a file for a batch and returns its object. Raises RemoteError, UsageError."""
        with open_lines(path) as file:
            boundary = secrets.token_hex(16)
            name = "".join(
                letter for letter in path.name if letter.isprintable() and letter not in '"\\'
            )
            head, tail = _form(boundary, name)
            size = len(head) + os.fstat(file.fileno()).st_size + len(tail)

            def body() -> Iterator[bytes]:
                yield head
                while piece := file.read(PIECE):
                    yield piece
                yield tail

            kind = {
                "Content-Type": f"multipart/form-data; boundary={boundary}",
                "Content-Length": str(size),
            }
            return self._object("POST", "/files", body(), kind)

    def delete(self, file_id: str) -> Json:
        """Deletes a file. Raises RemoteError, as all methods below."""
        return self._object("DELETE", f"/files/{quote(file_id, safe='')}")

    def download(self, file_id: str, out: BinaryIO) -> int:
        """Writes a file's content to `out` and returns its bytes. Raises RemoteError, or
        NoAnswerError if it broke off."""
        size = 0
        with self._ask("GET", f"/files/{quote(file_id, safe='')}/content") as answer:
            while piece := _read(answer, PIECE):
                out.write(piece)
                size += len(piece)
            if answer.length:
                raise NoAnswerError("the server broke off amid a file: try again")
        return size

    # --- the server's batches

    def create(self, file_id: str, endpoint: str) -> Json:
        asked = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
        return self._object(
            "POST", "/batches", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )

    def batch(self, batch_id: str) -> Json:
        return self._object("GET", f"/batches/{quote(batch_id, safe='')}")

    def cancel(self, batch_id: str) -> Json:
        return self._object("POST", f"/batches/{quote(batch_id, safe='')}/cancel", b"")

    # --- HTTP requests and answers

    def _object(self, *asked: Any) -> Json:
        """Returns the JSON object of an answer. asked: arguments of _ask."""
        with self._ask(*asked) as answer:
            data = _read(answer, LONGEST_ANSWER)
            if answer.length:  # the connection closed before the announced length
                raise NoAnswerError("the server broke off amid its answer: try again")
        found = parse_object(data)
        if not isinstance(found.get("id"), str):
            raise RemoteError("what answers there is no server of OpenAI's API: check --url")
        return found

    @contextlib.contextmanager
    def _ask(
        self,
        method: str,
        path: str,
        body: bytes | Iterator[bytes] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Yields the answer if its status is 200. Raises RemoteError."""
        kind = http.client.HTTPSConnection if self._safe else http.client.HTTPConnection
        connection = kind(self._host or "", self._port, timeout=ANSWER_SECONDS)
        try:
            try:
                connection.connect()
                # the server may refuse the request in the middle of the upload; its answer says why
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.request(
                        method, self._path + path, body, {**self._headers, **(headers or {})}
                    )
                answer = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise NoAnswerError(
                    f"{self.url} does not answer ({_words(error)}): start a server with --state-dir"
                    " there, or name another --url"
                ) from error
            if answer.status == 401:
                raise RemoteError(
                    f"{self.url} wants another API key: give --api-key, or set PENSTOCK_API_KEY, or"
                    " OPENAI_API_KEY, which is read where the others are missing",
                    status=401,
                )
            if answer.status != 200:
                raise RemoteError(_refusal(answer), status=answer.status)
            yield answer
        finally:
            connection.close()


def parse_object(data: bytes) -> Json:
    """Returns the JSON object in `data`, or an empty one if there is none."""
    found: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(data)
    return found if isinstance(found, dict) else {}


def open_lines(path: Path) -> BinaryIO:
    """Opens a file of JSON lines. Raises UsageError for a file that cannot be read or is
    compressed, and for a pipe or device, which has no size and perhaps no end."""
    if not path.is_file():
        raise UsageError(f"{path} is no file: name a file of JSON lines", param="file")
    try:
        file = path.open("rb")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({_words(error)}): name a file of JSON lines", param="file"
        ) from error
    if file.peek(2)[:2] == b"\x1f\x8b":
        file.close()
        raise UsageError(
            f"{path} is gzip, and servers take plain lines: gunzip -k it first", param="file"
        )
    return file


def _form(boundary: str, name: str) -> tuple[bytes, bytes]:
    """Returns the multipart bytes before and after a file."""
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
        "Content-Type: application/jsonl\r\n\r\n"
    )
    return head.encode("utf-8", "replace"), f"\r\n--{boundary}--\r\n".encode()


def _read(answer: http.client.HTTPResponse, size: int) -> bytes:
    try:
        return answer.read(size)
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswerError(
            f"the server broke off amid its answer ({_words(error)}): try again"
        ) from error


def _refusal(answer: http.client.HTTPResponse) -> str:
    """Returns an HTTP answer's error message in one line."""
    error = parse_object(_read(answer, PIECE)).get("error")
    message = error.get("message") if isinstance(error, dict) else None
    if not isinstance(message, str) or not message:
        return (
            f"the server answered {answer.status} {answer.reason} and didn't say why: check --url"
        )
    return f"the server refused: {message[:1000]}"


def _words(error: Exception) -> str:
    text = (
        error.strerror
        if isinstance(error, OSError) and error.strerror
        else str(error) or type(error).__name__
    )
    return text.lower()
