"""Turns: so many at once, and a place that is free goes to the owner who holds the fewest.

It knows owners and places; no batches. All of it is one event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator


class Turns:
    """`places` at once. Among owners who hold equally many, first come, first served."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._held: Counter[str] = Counter()
        self._line: list[tuple[str, asyncio.Future[None]]] = []  # empty while a place is free

    @contextlib.asynccontextmanager
    async def of(self, owner: str, waived: asyncio.Event) -> AsyncIterator[None]:
        """Waits for a place and holds it; whoever needs none any more, since `waived` is set, goes in without one."""
        held = await self._enter(owner, waived)
        try:
            yield
        finally:
            if held:
                self._leave(owner)

    async def _enter(self, owner: str, waived: asyncio.Event) -> bool:
        """Whether it has got a place."""
        if waived.is_set():
            return False
        if self._free:
            self._take(owner)
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((owner, turn))
        waiving = asyncio.create_task(waived.wait())
        got = False
        try:
            await asyncio.wait((turn, waiving), return_when=asyncio.FIRST_COMPLETED)
            got = turn.done()
        finally:
            waiving.cancel()
            if not turn.done():
                self._line.remove((owner, turn))
            elif not got:  # cancelled in the moment in which it was let in
                self._leave(owner)
        return got

    def _take(self, owner: str) -> None:
        self._free -= 1
        self._held[owner] += 1

    def _leave(self, owner: str) -> None:
        self._free += 1
        self._held[owner] -= 1
        if self._line:
            place = min(range(len(self._line)), key=lambda at: self._held[self._line[at][0]])
            owner, turn = self._line.pop(place)
            self._take(owner)
            turn.set_result(None)
