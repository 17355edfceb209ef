"""FairSemaphore: a weighted semaphore, fair between owners. Used for batches that run at the same
time, for lines at the engine, and for chats that are rendered. Knows weights and owners; no batches
or API keys. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class _Waiter:
    owner: str
    weight: tuple[int, int]
    turn: asyncio.Future[None]


class FairSemaphore:
    """A semaphore that limits places and bytes. Freed room goes to the waiting owner with the
    fewest places; between equals, to the one that waits longest. Nobody overtakes the one whose
    turn it is.

    The last one to enter may exceed the number of places. With lines of 300 samples and 576 places,
    the second line enters before the first one's last samples end, so that the engine's rows never
    run empty between lines. The limit on bytes is strict, since they are memory. Only a request
    larger than the whole limit may exceed it, and enters alone.
    """

    def __init__(self, places: int, bytes: int = 0) -> None:
        self.capacity = (places, bytes)
        self._taken = (0, 0)
        self._held: Counter[str] = Counter()  # owner -> number of places that it has taken
        self._waiting: list[_Waiter] = []  # waiting callers; empty if there is room

    async def acquire(self, places: int = 1, bytes: int = 0, owner: str = "") -> None:
        """Waits until `places` and `bytes` are free, and takes them."""
        waiter = _Waiter(owner, (places, bytes), asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._let_in()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._let_in()
            else:  # cancelled after it was let in, so it gives its room back
                self.release(places, bytes, owner)
            raise

    def take(self, owner: str) -> bool:
        """Takes one place if one is free and nobody waits. Returns True if it took one."""
        free = not self._waiting and self._fits((1, 0))
        if free:
            self._add(owner, (1, 0))
        return free

    def release(self, places: int = 1, bytes: int = 0, owner: str = "") -> None:
        self._add(owner, (-places, -bytes))
        self._let_in()

    @contextlib.asynccontextmanager
    async def slot(self, owner: str, waived: asyncio.Event) -> AsyncIterator[None]:
        """Holds one place during the block. If `waived` is set before a place is free, enters
        without one."""
        entering, waiving = (
            asyncio.ensure_future(self.acquire(owner=owner)),
            asyncio.ensure_future(waived.wait()),
        )
        held = False
        try:
            try:
                await asyncio.wait((entering, waiving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiving.cancel()
                held = not entering.cancel()
            yield
        finally:
            if held:
                self.release(owner=owner)

    def _let_in(self) -> None:
        while self._waiting:
            first = min(self._waiting, key=lambda waiter: self._held[waiter.owner])
            if not self._fits(first.weight):
                return
            self._waiting.remove(first)
            self._add(first.owner, first.weight)
            if not first.turn.done():
                first.turn.set_result(None)

    def _fits(self, weight: tuple[int, int]) -> bool:
        (places, bytes), (most_places, most_bytes) = self._taken, self.capacity
        return self._taken == (0, 0) or (places < most_places and bytes + weight[1] <= most_bytes)

    def _add(self, owner: str, weight: tuple[int, int]) -> None:
        self._taken = (self._taken[0] + weight[0], self._taken[1] + weight[1])
        self._held[owner] += weight[0]
        if not self._held[owner]:
            del self._held[owner]
