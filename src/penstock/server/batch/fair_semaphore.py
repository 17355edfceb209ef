"""What bounds a batch's memory and its place beside others: lines at the engine, and outcomes on their way to the disk.

It knows weights; no lines, no engine. All of it is one event loop's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar


class Gate:
    """Room for so many sequences and bytes at once, over all batches; first come, first served.

    Of sequences the bound is passed by the last line that goes in: with lines of 300 and room for 576, a second one is
    there before the first one's last samples end, so that the engine's rows don't drain line by line. Bytes are memory,
    and theirs is kept: a line that is larger than all of the room goes in alone.
    """

    def __init__(self, sequences: int, bytes: int) -> None:
        self.most = (sequences, bytes)
        self._taken = (0, 0)
        self._line: deque[tuple[tuple[int, int], asyncio.Future[None]]] = deque()

    async def enter(self, sequences: int, bytes: int) -> None:
        """Waits for its place; who comes in has to `leave`."""
        weight = (sequences, bytes)
        if not self._line and self._fits(weight):
            self._take(weight)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((weight, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was let in and left in the same moment
                self.leave(*weight)
            else:
                self._let_in()
            raise

    def leave(self, sequences: int, bytes: int) -> None:
        self._taken = (self._taken[0] - sequences, self._taken[1] - bytes)
        self._let_in()

    def _let_in(self) -> None:
        """Whoever has given up is passed over here, whether it knows of it by now or not."""
        while self._line and (self._line[0][1].cancelled() or self._fits(self._line[0][0])):
            weight, turn = self._line.popleft()
            if not turn.cancelled():
                self._take(weight)
                turn.set_result(None)

    def _fits(self, weight: tuple[int, int]) -> bool:
        (sequences, bytes), (most_sequences, most_bytes) = self._taken, self.most
        return self._taken == (0, 0) or (sequences < most_sequences and bytes + weight[1] <= most_bytes)

    def _take(self, weight: tuple[int, int]) -> None:
        self._taken = (self._taken[0] + weight[0], self._taken[1] + weight[1])


class Sized(Protocol):
    """What an outbox holds."""

    @property
    def body(self) -> bytes: ...


Item = TypeVar("Item", bound=Sized)


class Outbox(Generic[Item]):
    """Outcomes between those who compute and the one who writes; who brings more than fits waits."""

    def __init__(self, bytes: int) -> None:
        self._most = bytes
        self._items: list[Item] = []
        self._bytes = 0
        self._closed = False
        self._changed = asyncio.Condition()

    async def put(self, item: Item) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._bytes < self._most)
            self._items.append(item)
            self._bytes += len(item.body)
            self._changed.notify_all()

    async def close(self) -> None:
        """No more will come."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def some(self, patience: float) -> bool:
        """Waits until there are some, and `patience` seconds more for others, so that they share a sync. False: none
        are there and none will come."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._items or self._closed)
            full = lambda: self._closed or self._bytes >= self._most  # noqa: E731 - it is said once, here
            try:
                await asyncio.wait_for(self._changed.wait_for(full), patience)
            except TimeoutError:
                pass
            return bool(self._items)

    async def take(self) -> Sequence[Item]:
        """All of them; room is made by it."""
        async with self._changed:
            items, self._items, self._bytes = self._items, [], 0
            self._changed.notify_all()
            return items
