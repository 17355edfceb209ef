"""Bodies in one go, which may be tens of megabytes: how they are paced while written, and handed to the connection.

Both let the loop turn, since every other client's stream is on it. It knows bytes; no calls, no engine.
"""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

JSON = "application/json"
TURN = 8_192  # tokens, and likely ones, that are written in one turn of the loop; 2 to 4 ms
PIECE = 256 * 1024  # bytes of a body that are handed to the connection at once


class Pace:
    """Lets the loop turn while answers are written: samples of one step may bring a million tokens at once."""

    def __init__(self) -> None:
        self._left = TURN
        self._turning = asyncio.Lock()

    async def spend(self, work: int) -> None:
        """After so many tokens. One writer at a time waits for a turn; those that come meanwhile wait for theirs."""
        self._left -= work
        if self._left > 0:
            return
        async with self._turning:
            await asyncio.sleep(0)
            self._left = TURN


class Whole(Response):
    """A body that is there in pieces, handed on as the connection takes them."""

    def __init__(self, pieces: list[bytes], request_id: str) -> None:
        size = sum(map(len, pieces))
        super().__init__(media_type=JSON, headers={"content-length": str(size), "x-request-id": request_id})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        begin = size = 0
        for place, piece in enumerate(self._pieces):
            size += len(piece)
            if size >= PIECE:
                data = b"".join(self._pieces[begin : place + 1])
                await send({"type": "http.response.body", "body": data, "more_body": True})
                begin, size = place + 1, 0
        await send({"type": "http.response.body", "body": b"".join(self._pieces[begin:]), "more_body": False})
