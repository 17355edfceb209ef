"""Bodies on their way in: seconds and bytes of each, and bytes of all together, until they are
token ids. It knows HTTP messages; no form, no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

from starlette.requests import Request

from penstock.server.online.request_limits import QueueFullError
from penstock.server.openai.http_errors import HttpError, shutting_down
from penstock.server.openai.http_limits import LONG_BODY, HttpLimits

# bytes of a body; a text of 32 MiB may be 128 MiB of characters, by one of them
LARGE = 1024 * 1024
# one part in so many of what may be on its way in is left to long bodies: half-sent ones bar no
# short one
OF_LONG = 4
TRY_AGAIN = 1  # seconds after which bodies that had no room are sent again


# bytes a second that a body has to come with, once its first seconds are over
BODY_RATE = 16 * 1024


class BodyTimeouts:
    """Those of one service, until it ends."""

    def __init__(self) -> None:
        self._open: set[asyncio.Timeout] = set()
        self._closed = False

    @contextlib.asynccontextmanager
    async def within(self, seconds: float, what: str) -> AsyncIterator[Callable[[int], None]]:
        """For as long as a body comes; what this gives is to be told how many bytes are here, by
        and by: they give it more time. Raises HttpError, which calls it `what`, and
        ShuttingDownError."""
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
        except TimeoutError:  # a disk raises none
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
        """The server ends: whoever waits for a body waits no more."""
        self._closed = True
        for patience in self._open:
            if not patience.expired():
                patience.reschedule(0)

    def _more(self, patience: asyncio.Timeout, until: float) -> None:
        if not (self._closed or patience.expired()):
            patience.reschedule(until)


class BodyRoom:
    """What a body takes until it is token ids, the end of its `with`, while it is a large one."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._bytes = 0

    def __enter__(self) -> BodyRoom:
        return self

    def __exit__(self, *_: object) -> None:
        self._intake.large -= self._bytes
        self._bytes = 0

    def take(self, size: int) -> None:
        """The body has, or will have, so many bytes. Raises HttpError; what is alone may be larger
        than all room."""
        intake = self._intake
        if size <= max(LARGE, self._bytes):
            return
        if intake.large != self._bytes and intake.large - self._bytes + size > intake.most_large:
            raise _busy()
        intake.large += size - self._bytes
        self._bytes = size

    def left(self, size: int) -> None:
        """Only so many bytes of the body are left."""
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
    """Returns the bytes that a body says it has; 0 where it doesn't say."""
    declared = request.headers.get("content-length", "")
    return int(declared[:99]) if declared.isascii() and declared.isdigit() else 0


class Intake:
    """Bodies on their way in. Of several servers each has its part of the room for large ones."""

    def __init__(self, limits: HttpLimits, timeouts: BodyTimeouts, servers: int = 1) -> None:
        self.limits, self._timeouts = limits, timeouts
        self.most_large = limits.max_large_bytes // servers
        self.bytes = 0  # of bodies that are being received
        self.large = 0  # of large ones that are not token ids yet
        self._waiting = 0  # of those that are here, and wait to be read

    def place(self) -> BodyRoom:
        """Around what is done with one body."""
        return BodyRoom(self)

    @contextlib.contextmanager
    def waiting(self, size: int) -> Iterator[None]:
        """While a body that is here waits to be read. Raises HttpError where as many bytes as large
        ones may have wait: bodies of a megabyte, which aren't large, would take as much memory as
        somebody sends."""
        if self._waiting and self._waiting + size > self.most_large:
            raise _busy()
        self._waiting += size
        try:
            yield
        finally:
            self._waiting -= size

    async def read(self, request: Request, place: BodyRoom) -> bytearray:
        """Reads the whole body. Raises HttpError, of one that is too large as soon as it is known
        to be; ShuttingDownError."""
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
