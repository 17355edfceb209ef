"""Incoming bodies: time and size limits of each, and of all together until they are token ids.
Knows HTTP messages; no form, no engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

from starlette.requests import Request

from penstock.server.online.request_limits import QueueFullError
from penstock.server.openai.http_errors import HttpError, shutting_down
from penstock.server.openai.http_limits import LONG_BODY, HttpLimits

# bytes above which a body counts as large; a text of 32 MiB becomes 128 MiB if one of its
# characters needs four bytes
LARGE = 1024 * 1024
# long bodies may use one part in so many of the receiving room, so that half-sent ones block no
# short ones
OF_LONG = 4
TRY_AGAIN = 1  # seconds for Retry-After when there is no room for a body


# bytes per second at which a body must arrive after its first seconds
BODY_RATE = 16 * 1024


class BodyTimeouts:
    """Timeouts of one service's incoming bodies."""

    def __init__(self) -> None:
        self._open: set[asyncio.Timeout] = set()
        self._closed = False

    @contextlib.asynccontextmanager
    async def within(self, seconds: float, what: str) -> AsyncIterator[Callable[[int], None]]:
        """Limits the time of the block, which receives a body. Yields a function to call with the
        number of bytes received so far, which extends the time. Raises HttpError, which calls the
        body `what`, and ShuttingDownError."""
        if self._closed:
            raise shutting_down()
        begun = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(seconds) as patience:
                self._open.add(patience)
                try:
                    yield lambda size: self._more(patience, begun + seconds + size / BODY_RATE)
                finally:
                    self._open.discard(patience)
        except TimeoutError:  # only from the timeout: files raise no TimeoutError
            if self._closed:
                raise shutting_down() from None
            message = (
                f"{what} took longer than {seconds:g} s, and a second more for each 16 KiB: send it"
                " faster"
            )
            raise HttpError(
                message, status=408, code="body_too_slow", headers={"connection": "close"}
            ) from None

    def close(self) -> None:
        """Ends all waits for bodies, for a shutdown."""
        self._closed = True
        for patience in self._open:
            if not patience.expired():
                patience.reschedule(0)

    def _more(self, patience: asyncio.Timeout, until: float) -> None:
        if not (self._closed or patience.expired()):
            patience.reschedule(until)


class BodyRoom:
    """The room that a large body takes until it has become token ids or its `with` block ends."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._bytes = 0

    def __enter__(self) -> BodyRoom:
        return self

    def __exit__(self, *_: object) -> None:
        self._intake.large -= self._bytes
        self._bytes = 0

    def take(self, size: int) -> None:
        """Takes room for a body of `size` bytes. Raises HttpError if there is none; a body that is
        alone may exceed the whole room."""
        intake = self._intake
        if size <= max(LARGE, self._bytes):
            return
        if intake.large != self._bytes and intake.large - self._bytes + size > intake.most_large:
            raise _busy()
        intake.large += size - self._bytes
        self._bytes = size

    def left(self, size: int) -> None:
        """Frees the room of all but `size` bytes of the body."""
        if size < self._bytes:
            size = size if size > LARGE else 0
            self._intake.large -= self._bytes - size
            self._bytes = size


def _busy() -> HttpError:
    message = (
        "the server has as many large bodies as it takes: send this again after the seconds in"
        " Retry-After"
    )
    return HttpError(
        message, status=503, code="server_busy", headers={"retry-after": str(TRY_AGAIN)}
    )


def declared_size(request: Request) -> int:
    """Returns the body's length from its header; 0 without one."""
    declared = request.headers.get("content-length", "")
    return int(declared[:99]) if declared.isascii() and declared.isdigit() else 0


class Intake:
    """Receives bodies. Each of several servers has an equal part of the room for large ones."""

    def __init__(self, limits: HttpLimits, timeouts: BodyTimeouts, servers: int = 1) -> None:
        self.limits, self._timeouts = limits, timeouts
        self.most_large = limits.max_large_bytes // servers
        self.bytes = 0  # bytes of bodies being received
        self.large = 0  # bytes of large bodies that are not token ids yet
        self._waiting = 0  # bytes of complete bodies that wait to be parsed

    def place(self) -> BodyRoom:
        """Returns the room for one body, a context manager around its handling."""
        return BodyRoom(self)

    @contextlib.contextmanager
    def waiting(self, size: int) -> Iterator[None]:
        """Counts a complete body while it waits to be parsed. Raises HttpError past the bound for
        large bodies: many bodies of a megabyte each, which aren't large, would otherwise fill the
        memory."""
        if self._waiting and self._waiting + size > self.most_large:
            raise _busy()
        self._waiting += size
        try:
            yield
        finally:
            self._waiting -= size

    async def read(self, request: Request, place: BodyRoom) -> bytearray:
        """Reads the whole body. Raises HttpError, for a too large body as soon as its size is
        known, and ShuttingDownError."""
        limits = self.limits
        declared = declared_size(request)
        if declared > limits.max_body_bytes:
            raise self._too_large()
        place.take(declared)
        body = bytearray()
        try:
            async with self._timeouts.within(limits.body_seconds, "the body") as more_time:
                async for piece in request.stream():
                    body += piece
                    self.bytes += len(piece)
                    if len(body) > limits.max_body_bytes:
                        raise self._too_large()
                    place.take(len(body))
                    share = 1 if len(body) <= LONG_BODY else OF_LONG
                    if self.bytes * share > limits.max_reading_bytes:
                        raise QueueFullError(
                            "the server is receiving as much as it takes: send it again", TRY_AGAIN
                        )
                    more_time(len(body))
        finally:
            self.bytes -= len(body)
        return body

    def _too_large(self) -> HttpError:
        message = f"the body is larger than {self.limits.max_body_bytes} bytes: send it in parts"
        return HttpError(message, status=413, code="body_too_large")
