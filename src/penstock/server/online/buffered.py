"""Bodies in one go, of tens of megabytes perhaps: paced while written, so that the loop turns,
counted and bounded while held, handed to the connection in pieces. It knows bytes; no calls, no
engine.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.http_limits import USUAL

JSON = "application/json"


def json_response(content: Any, status: int = 200) -> Response:
    """Returns a small answer."""
    return Response(msgspec.json.encode(content), status_code=status, media_type=JSON)


class Yielder:
    """Lets the loop turn while answers are written: samples of one step may bring a million tokens
    at once."""

    def __init__(self, turn: int) -> None:
        self._turn = self._left = turn
        self._turning = asyncio.Lock()

    async def spend(self, work: int) -> None:
        """After so many tokens. One writer at a time waits for a turn; those that come meanwhile
        wait for theirs."""
        self._left -= work
        if self._left > 0:
            return
        async with self._turning:
            await asyncio.sleep(0)
            self._left = self._turn


class AnswerTooLargeError(HttpError):
    """A whole answer that there is no room for: of all that are held it was the largest."""

    status, code = 400, "answer_too_large"

    def __init__(self) -> None:
        what = "this answer takes more bytes than the server holds"
        super().__init__(f"{what}: stream it, or ask for fewer samples, tokens or logprobs")


class BufferedBody:
    """The pieces of one body. Its bytes are counted from `put` to `take`, or to the end of its
    `with`."""

    def __init__(self, budget: ResponseBudget, pieces: list[bytes]) -> None:
        self._budget, self.pieces = budget, pieces
        self.bytes = 0
        self.given_up = False
        self._taken = 0  # pieces

    def __enter__(self) -> BufferedBody:
        self._budget.add(self, sum(map(len, self.pieces)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._budget.remove(self)

    def put(self, at: int, piece: bytes) -> None:
        """Raises AnswerTooLargeError, also where it was given up since the last time."""
        self.check()
        self.pieces[at] = piece
        self._budget.add(self, len(piece))
        self.check()

    def check(self) -> None:
        """Raises AnswerTooLargeError where it was given up."""
        if self.given_up:
            raise AnswerTooLargeError

    def take(self) -> tuple[bytes, bool]:
        """The next piece of it, and whether there is more."""
        begin, size = self._taken, 0
        while self._taken < len(self.pieces) and size < self._budget.piece:
            size += len(self.pieces[self._taken])
            self._taken += 1
        data = b"".join(self.pieces[begin : self._taken])
        self.pieces[begin : self._taken] = [b""] * (self._taken - begin)
        self._budget.add(self, -size)
        return data, self._taken < len(self.pieces)

    def give_up(self) -> None:
        """Lets its bytes go, whoever still waits for them."""
        self.given_up = True
        self.pieces.clear()
        self._budget.remove(self)


class ResponseBudget:
    """Whole bodies: being written, or on their way. Past `most` bytes the largest is given up, so
    that one that asks for too much, or reads too slowly, costs itself and not the others. What is
    kept is done, and never given up: others that are being written are, for it."""

    def __init__(self, most: int, piece: int = USUAL.piece_bytes) -> None:
        self.most, self.piece = most, piece
        self.bytes = 0  # of all
        self.kept = 0  # of those that are kept
        self._held: set[BufferedBody] = set()
        self._less_kept = asyncio.Event()

    def hold(self, pieces: list[bytes]) -> BufferedBody:
        """For a `with`; the list is the holder's from here on."""
        return BufferedBody(self, pieces)

    def add(self, held: BufferedBody, size: int) -> None:
        self._held.add(held)
        held.bytes += size
        self._count(size)

    def remove(self, held: BufferedBody) -> None:
        """Idempotent."""
        self.bytes -= held.bytes
        held.bytes = 0
        self._held.discard(held)

    def keep(self, size: int) -> None:
        """Counts a body that is done, until it is let go."""
        self.kept += size
        self._count(size)

    def let_go(self, size: int) -> None:
        self.kept -= size
        self.bytes -= size
        self._less_kept.set()

    async def until_kept(self, most: int) -> None:
        """Waits until no more than so many bytes are kept."""
        while self.kept > most:
            self._less_kept.clear()
            await self._less_kept.wait()

    def _count(self, size: int) -> None:
        self.bytes += size
        while self.bytes > self.most:
            largest = max(self._held, key=lambda each: each.bytes, default=None)
            if largest is None or not largest.bytes:  # all of it is kept
                return
            largest.give_up()


class BufferedResponse(Response):
    """A body that is there in pieces, handed on as the connection takes them. One that is given up
    meanwhile stays without its end, and the connection is closed: its length was said."""

    def __init__(self, budget: ResponseBudget, pieces: list[bytes], request_id: str) -> None:
        size = sum(map(len, pieces))
        super().__init__(
            media_type=JSON, headers={"content-length": str(size), "x-request-id": request_id}
        )
        self._budget, self._pieces = budget, pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._budget.hold(self._pieces) as held:
            held.check()
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            more = True
            while more and not held.given_up:
                data, more = held.take()
                await send({"type": "http.response.body", "body": data, "more_body": more})
