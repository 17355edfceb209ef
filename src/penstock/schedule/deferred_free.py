"""DeferredFree: rows and blocks that nobody may have yet, because flights that name them are still to be read.

It knows row numbers, block numbers and flight numbers.
"""

from __future__ import annotations

import numpy as np

from penstock.schedule.rows import Rows
from penstock.schedule.step import Int32, Int64


class DeferredFree:
    """What left the steps, by the last flight that names it."""

    def __init__(self) -> None:
        self._rows: Int32 = np.zeros(0, np.int32)
        self._until: Int64 = np.zeros(0, np.int64)
        self._blocks: list[tuple[int, Int32]] = []

    @property
    def empty(self) -> bool:
        return not self._rows.size and not self._blocks

    def add_rows(self, rows: Int32, columns: Rows) -> None:
        """Rows that ended or were preempted; their own blocks stay with them."""
        self._rows = np.concatenate((self._rows, rows))
        self._until = np.concatenate((self._until, columns.last_flight[rows]))

    def add_blocks(self, blocks: Int32, until: int) -> None:
        if blocks.size:
            self._blocks.append((until, blocks))

    def blocks_coming(self, columns: Rows) -> int:
        """Blocks that will be free once all flights are read."""
        own = int((columns.blocks[self._rows] - columns.shared[self._rows]).sum()) if self._rows.size else 0
        return own + sum(blocks.size for _, blocks in self._blocks)

    def take(self, read: int) -> tuple[Int32, list[Int32]]:
        """Rows and blocks that no flight after `read` names."""
        if self._rows.size:
            over = self._until <= read
            rows, self._rows, self._until = self._rows[over], self._rows[~over], self._until[~over]
        else:
            rows = self._rows
        blocks = [blocks for until, blocks in self._blocks if until <= read]
        self._blocks = [(until, blocks) for until, blocks in self._blocks if until > read]
        return rows, blocks
