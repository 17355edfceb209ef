"""Bodies on their way in: how long each may take, and that whoever still sends one hears of the server's end.

It knows seconds and bytes; not what comes, or where it goes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from penstock.server.openai.http_errors import HttpError, shutting_down

BODY_RATE = 16 * 1024  # bytes a second that a body has to come with, once its first seconds are over


class BodyTimeouts:
    """Those of one service, until it ends."""

    def __init__(self) -> None:
        self._open: set[asyncio.Timeout] = set()
        self._closed = False

    @contextlib.asynccontextmanager
    async def within(self, seconds: float, what: str) -> AsyncIterator[Callable[[int], None]]:
        """For as long as a body comes; what this gives is to be told how many bytes are here, by and by: they give it
        more time. Raises HttpError, which calls it `what`, and ShuttingDownError."""
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
            message = f"{what} took longer than {seconds:g} s, and a second more for each 16 KiB: send it faster"
            raise HttpError(message, status=408, code="body_too_slow", headers={"connection": "close"}) from None

    def close(self) -> None:
        """The server ends: whoever waits for a body waits no more."""
        self._closed = True
        for patience in self._open:
            if not patience.expired():
                patience.reschedule(0)

    def _more(self, patience: asyncio.Timeout, until: float) -> None:
        if not (self._closed or patience.expired()):
            patience.reschedule(until)
