"""Budget: a limit for the bytes that several holders have in memory together. Knows numbers; no
bodies, no errors. Belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self


class Budget:
    """The bytes of several holders, and their limit. most: the limit. grown: called each time that
    a holder's bytes have grown; raises an error, or frees bytes of others, above the limit."""

    def __init__(self, most: int, grown: Callable[[HeldBytes], None]) -> None:
        self.most, self.grown = most, grown
        self.bytes = 0  # bytes of all holders


class HeldBytes:
    """The bytes of one holder, counted until its `with` block ends."""

    def __init__(self, budget: Budget) -> None:
        self.budget, self.bytes = budget, 0
        self._less = asyncio.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.add(-self.bytes)

    def add(self, size: int) -> None:
        """Counts `size` bytes more; a negative size counts fewer. Raises the error of the
        budget's `grown`; the bytes then count until the `with` block ends."""
        self.bytes += size
        self.budget.bytes += size
        if size > 0:
            self.budget.grown(self)
        else:
            self._less.set()

    async def until(self, most: int) -> None:
        """Waits until the holder has at most `most` bytes."""
        while self.bytes > most:
            self._less.clear()
            await self._less.wait()
