"""Receives request bodies within limits. Limits time and size of each body, and the size of all
bodies together until they are token ids. Knows HTTP messages; no JSON fields, no engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request

from penstock.server.online.budget import Budget, HeldBytes
from penstock.server.online.request_limits import QueueFullError
from penstock.server.openai.http_errors import HttpError, shutting_down
from penstock.server.openai.http_limits import LONG_BODY, HttpLimits

# bytes above which a body counts as large; as a Python text 32 MiB become 128 MiB if one character
# needs four bytes
LARGE = 1024 * 1024
# long bodies may use only 1 / OF_LONG of the bytes for bodies being received, so that half-sent
# ones don't block short ones
OF_LONG = 4
TRY_AGAIN = 1  # seconds in the header Retry-After when there is no room for a body


# bytes per second at which a body must arrive after the first body_seconds
BODY_RATE = 16 * 1024


class BodyTimeouts:
    """Timeouts of the bodies that one server process is receiving."""

    def __init__(self) -> None:
        self._open: set[asyncio.Timeout] = set()
        self._closed = False

    @contextlib.asynccontextmanager
    async def within(self, seconds: float, what: str) -> AsyncIterator[Callable[[int], None]]:
        """Limits the time of the block, which receives a body. Yields a function that extends the
        time; it takes the number of bytes received so far. seconds: time without extension. what:
        name of the body in the error. Raises HttpError at the timeout, and ShuttingDownError."""
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
        except TimeoutError:  # comes only from this timeout, since files raise no TimeoutError
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
        """Ends all waits for request bodies, for a shutdown."""
        self._closed = True
        for patience in self._open:
            if not patience.expired():
                patience.reschedule(0)

    def _more(self, patience: asyncio.Timeout, until: float) -> None:
        if not (self._closed or patience.expired()):
            patience.reschedule(until)


class BodyRoom(HeldBytes):
    """The bytes of one body that count as large, until it has become token ids or its `with` block
    ends."""

    def count(self, size: int) -> None:
        """Counts a body of `size` bytes; one that is not large counts nothing. Raises HttpError if
        all large bodies together would exceed the limit; a single body may."""
        self.add((size if size > LARGE else 0) - self.bytes)


def _check_room(held: HeldBytes) -> None:
    """Raises HttpError if large bodies exceed their limit, unless `held` is the only one."""
    if held.budget.bytes > max(held.budget.most, held.bytes):
        message = (
            "the server has as many large bodies as it takes: send this again after the seconds in"
            " Retry-After"
        )
        raise HttpError(
            message, status=503, code="server_busy", headers={"retry-after": str(TRY_AGAIN)}
        )


def _check_receiving(held: HeldBytes) -> None:
    """Raises QueueFullError if the bodies being received exceed their limit, or, for a long body,
    the long ones' part of it."""
    most = held.budget.most // (1 if held.bytes <= LONG_BODY else OF_LONG)
    if held.budget.bytes > most:
        raise QueueFullError(
            "the server is receiving as much as it takes: send it again", TRY_AGAIN
        )


def declared_size(request: Request) -> int:
    """Returns the body's length by its Content-Length header; 0 without that header."""
    declared = request.headers.get("content-length", "")
    return int(declared[:99]) if declared.isascii() and declared.isdigit() else 0


class Intake:
    """Receives bodies. Each of several server processes has an equal share of the limit for large
    bodies."""

    def __init__(self, limits: HttpLimits, timeouts: BodyTimeouts, servers: int = 1) -> None:
        self.limits, self._timeouts = limits, timeouts
        self.receiving = Budget(limits.max_reading_bytes, _check_receiving)
        # large bodies that are not token ids yet
        self.large = Budget(limits.max_large_bytes // servers, _check_room)
        # complete bodies that wait to be parsed; many of just under a megabyte would fill the
        # memory too
        self.parsing = Budget(self.large.most, _check_room)

    async def read(self, request: Request, place: BodyRoom) -> bytearray:
        """Receives the whole body. place: counts its bytes. Raises HttpError, for a too large body
        as soon as its size is known, and ShuttingDownError."""
        limits = self.limits
        declared = declared_size(request)
        if declared > limits.max_body_bytes:
            raise self._too_large()
        place.count(declared)
        body = bytearray()
        with HeldBytes(self.receiving) as received:
            async with self._timeouts.within(limits.body_seconds, "the body") as more_time:
                async for piece in request.stream():
                    body += piece
                    if len(body) > limits.max_body_bytes:
                        raise self._too_large()
                    place.count(max(declared, len(body)))
                    received.add(len(piece))
                    more_time(len(body))
        return body

    def _too_large(self) -> HttpError:
        message = f"the body is larger than {self.limits.max_body_bytes} bytes: send it in parts"
        return HttpError(message, status=413, code="body_too_large")
