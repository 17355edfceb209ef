"""Whole answers within a memory budget. Answers that are not streamed may have tens of megabytes:
they are encoded in pieces between which the event loop runs, and their bytes are counted until they
are sent. Knows bytes; no calls, no engine."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.server.online.budget import Budget, HeldBytes
from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.http_limits import USUAL

JSON = "application/json"


def json_response(content: Any, status: int = 200) -> Response:
    """Returns an answer with `content` as JSON."""
    return Response(msgspec.json.encode(content), status_code=status, media_type=JSON)


class Yielder:
    """Lets the event loop run while answers are encoded, since the samples of one step may hold a
    million tokens. turn: tokens between two turns."""

    def __init__(self, turn: int) -> None:
        self._turn = self._left = turn
        self._turning = asyncio.Lock()

    async def spend(self, work: int) -> None:
        """Counts `work` encoded tokens, and lets the event loop run after every `turn` tokens. Only
        one caller waits at a time."""
        self._left -= work
        if self._left > 0:
            return
        async with self._turning:
            await asyncio.sleep(0)
            self._left = self._turn


class AnswerTooLargeError(HttpError):
    """Raised for the largest buffered answer when all of them together exceed the memory budget."""

    status, code = 400, "answer_too_large"

    def __init__(self) -> None:
        what = "this answer takes more bytes than the server holds"
        super().__init__(f"{what}: stream it, or ask for fewer samples, tokens or logprobs")


class BufferedBody(HeldBytes):
    """The pieces of one answer's body. Their bytes count against the budget from `put` until
    `take`, or until the `with` block ends."""

    budget: ResponseBudget

    def __init__(self, budget: ResponseBudget, pieces: list[bytes]) -> None:
        super().__init__(budget)
        self.pieces = pieces
        self.given_up = False
        self._taken = 0  # number of `pieces` that `take` has returned

    def __enter__(self) -> Self:
        self.budget.held.add(self)
        self.add(sum(map(len, self.pieces)))
        return self

    def __exit__(self, *error: object) -> None:
        self.budget.held.discard(self)
        super().__exit__(*error)

    def put(self, at: int, piece: bytes) -> None:
        """Stores piece number `at`. Raises AnswerTooLargeError if the body was given up, now or
        earlier."""
        self.check()
        self.pieces[at] = piece
        self.add(len(piece))
        self.check()

    def check(self) -> None:
        """Raises AnswerTooLargeError if the body was given up to save memory."""
        if self.given_up:
            raise AnswerTooLargeError

    def take(self) -> tuple[bytes, bool]:
        """Returns the next bytes to send, and True if more follow."""
        begin, size = self._taken, 0
        while self._taken < len(self.pieces) and size < self.budget.piece:
            size += len(self.pieces[self._taken])
            self._taken += 1
        data = b"".join(self.pieces[begin : self._taken])
        self.pieces[begin : self._taken] = [b""] * (self._taken - begin)
        self.add(-size)
        return data, self._taken < len(self.pieces)

    def give_up(self) -> None:
        """Drops the body's pieces. The request that waits for them then fails."""
        self.given_up = True
        self.pieces.clear()
        self.add(-self.bytes)


class ResponseBudget(Budget):
    """Limits the bytes of whole answers, while they are encoded and while they are sent. Above
    `most` bytes the largest answer is given up, so that a request that asks for too much, or is
    read too slowly, fails alone. piece: bytes passed to a connection at once."""

    def __init__(self, most: int, piece: int = USUAL.piece_bytes) -> None:
        super().__init__(most, self._make_room)
        self.piece = piece
        self.held: set[BufferedBody] = set()
        self.kept = HeldBytes(self)  # complete answers of batches, which are never given up

    def hold(self, pieces: list[bytes]) -> BufferedBody:
        """Returns a context manager that counts `pieces` as one body. The caller must not change
        the list afterwards."""
        return BufferedBody(self, pieces)

    def _make_room(self, _: HeldBytes) -> None:
        while self.bytes > self.most:
            largest = max(self.held, key=lambda each: each.bytes, default=None)
            if largest is None or not largest.bytes:  # only kept bodies are left
                return
            largest.give_up()


class BufferedResponse(Response):
    """A response from pieces in memory, sent as fast as the client reads. If it is given up
    meanwhile, the rest is not sent and the connection closes, since the headers have announced its
    length.
    """

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
