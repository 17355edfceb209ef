"""Outcomes between those who compute them and the one who writes them to the disk. It knows their bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from penstock.server.batch.output_files import LineResult, UnrunLine


class Outbox:
    """Holds so many bytes; who brings more waits."""

    def __init__(self, bytes: int) -> None:
        self._most = bytes
        self._items: list[LineResult | UnrunLine] = []
        self._bytes = 0
        self._closed = False
        self._changed = asyncio.Condition()

    async def put(self, item: LineResult | UnrunLine) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._bytes < self._most)
            self._items.append(item)
            self._bytes += len(item.body)
            self._changed.notify_all()

    async def close(self) -> None:
        """Says that no more will come."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def take(self, patience: float) -> Sequence[LineResult | UnrunLine]:
        """Waits until there are some, and `patience` seconds more for others, and returns all; none at the end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._items or self._closed)
            with contextlib.suppress(TimeoutError):
                full = self._changed.wait_for(lambda: self._closed or self._bytes >= self._most)
                await asyncio.wait_for(full, patience)
            items, self._items, self._bytes = self._items, [], 0
            self._changed.notify_all()
            return items
