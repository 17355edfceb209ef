"""WindowedPool: KV cache blocks for models with sliding windows. All blocks come from one pool of
equal pages.

    block   one page, by its own number, for the layers with full attention
    pages   window_tables more, for layers with windows; `pages[block]` lists them, 0: none

When a row's window has passed a block, the row no longer needs the block's window pages. They
become loose once no other row needs them. When free pages run out, loose ones are taken before
anything in the prefix tree is evicted. The device runs steps in order, so a page may be given out
again while steps in flight still read it; it is cleared first (StepPlan.window_pages). Knows
blocks, pages and rows' columns; no layers. docs/design/kv_by_layer.md gives the reasons.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.config import BLOCK_SIZE
from penstock.errors import CapacityError
from penstock.schedule.blocks import BlockPool
from penstock.schedule.rows import Rows
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.step import Bool, Int32, Int64


def pool_of(limits: SchedulerConfig) -> BlockPool:
    """Returns the pool for these limits: windowed if the model has layers with windows."""
    if not limits.window_tables:
        return BlockPool(limits.num_blocks)
    return WindowedPool(limits.num_blocks, limits.window, limits.window_tables)


class WindowedPool(BlockPool):
    """Pool of `num_blocks` pages, the scratch block included. window: tokens that a token attends
    to, itself included."""

    def __init__(
        self,
        num_blocks: int,
        window: int,
        tables: int,
        on_evict: Callable[[Int32], None] | None = None,
    ) -> None:
        super().__init__(num_blocks, on_evict)
        self.window, self.tables, self.per_block = window, tables, 1 + tables
        self.near = max(1, -(-(window - 1) // BLOCK_SIZE))
        self.pages: Int32 = np.full((num_blocks, tables), 0, np.int32)
        # True for held blocks whose window pages no row needs
        self._is_loose: Bool = np.full(num_blocks, False, np.bool_)
        self._loose = 0  # number of window pages that loose blocks hold
        self._fresh: list[Int32] = []

    @property
    def available(self) -> int:
        return (self._top + self._idle + self._loose) // self.per_block

    @property
    def free(self) -> int:
        return self._top // self.per_block

    @property
    def held(self) -> int:
        return self.num_blocks - 1 - self._top - self._idle - self._loose

    def take(self, count: int) -> Int32:
        need = count * self.per_block
        if need > self._top:
            self._detach(
                np.flatnonzero(self._is_loose)[: self._at_once(need - self._top)].astype(np.int32)
            )
        while need > self._top and self._idle:
            self._evict(self._at_once(need - self._top))
        if need > self._top:
            raise CapacityError(f"the KV pool was asked for {need} pages and has {self._top}")
        self._top -= need
        taken = self._stack[self._top : self._top + need].copy()
        blocks = taken[:count]
        self.refs[blocks] = 1
        self.pages[blocks] = taken[count:].reshape(count, self.tables)
        self._fresh.append(blocks)
        return blocks

    def take_fresh(self) -> Int32:
        """Returns the blocks given out since the last call, each followed by its pages, int32 [n, 1
        + tables]."""
        if not self._fresh:
            return np.zeros((0, self.per_block), np.int32)
        blocks = self._distinct(np.concatenate(self._fresh))
        self._fresh = []
        blocks = blocks[self.pages[blocks, 0] > 0]
        return np.concatenate((blocks[:, None], self.pages[blocks]), axis=1)

    def is_whole(self, block: int) -> bool:
        return bool(self.pages[block, 0])

    def past(self, position: int) -> int:
        return max(0, (position - self.window + 1) // BLOCK_SIZE)

    def copies(self, source: Int32, target: Int32) -> list[Int32]:
        pages = np.stack((self.pages[source], self.pages[target]), axis=2).reshape(-1, 2)
        return [*super().copies(source, target), pages]

    def share_beginning(self, blocks: Int32) -> None:
        """Adds one reference to each block. The window reaches only the last blocks, whose window
        pages are needed again."""
        self.share(blocks)
        near = blocks[-self.near :]
        loose = near[self._is_loose[near]]
        self._is_loose[loose] = False
        self._loose -= loose.size * self.tables
        self.loosen(blocks[: -self.near])

    def loosen(self, blocks: Int32) -> None:
        """Marks the window pages of `blocks` (repeats allowed) as loose, if no other row holds the
        blocks."""
        alone = (self.refs[blocks] == 1) & (self.pages[blocks, 0] > 0) & ~self._is_loose[blocks]
        loose = self._distinct(blocks[alone])
        self._is_loose[loose] = True
        self._loose += loose.size * self.tables

    def pass_prompt(self, blocks: Int32, passed: int, position: int) -> int:
        """Marks window pages as loose in the blocks that the window of a prompt has passed; its
        next chunk begins at `position`. passed: number of blocks passed before; returns the new
        number."""
        reached = max(passed, self.past(position))
        self.loosen(blocks[passed:reached])
        return reached

    def pass_rows(self, rows: Int32, columns: Rows) -> None:
        """Marks window pages as loose in blocks that the windows of running rows [k] have passed.
        Blocks that a fork group's samples share stay as long as a later sample may need them; a
        request's only sample also passes its prompt's blocks."""
        at = columns.planned_length[rows] - columns.drafted[rows]
        reached = np.maximum((at - self.window + 1) // BLOCK_SIZE, columns.passed[rows]).astype(
            np.int32
        )
        passed, shared = columns.passed[rows], columns.shared[rows]
        of_all = np.where(columns.single[rows], np.minimum(reached, shared), columns.bound[rows])
        own = np.maximum(passed, shared)
        self.loosen(columns.entries(rows, passed, np.maximum(of_all - passed, 0)))
        self.loosen(columns.entries(rows, own, np.maximum(reached - own, 0)))
        columns.passed[rows] = reached

    def pages_of(self, rows: Int64, columns: Rows) -> tuple[Int32, Int32]:
        """Returns, for rows [k], the number of pages that each holds alone, and the number of
        further blocks until its window is full."""
        blocks, shared, passed = columns.blocks[rows], columns.shared[rows], columns.passed[rows]
        near = blocks - np.maximum(shared, passed)
        window = np.where(columns.single[rows], blocks - passed, near)
        return blocks - shared + self.tables * near, np.maximum(self.near + 2 - window, 0).astype(
            np.int32
        )

    def _at_once(self, pages: int) -> int:
        """Blocks to free at once when `pages` pages are missing: a few more than needed, since a
        search costs O(blocks)."""
        return max(-(-pages // self.tables), self.num_blocks // 64)

    def _weight(self, blocks: Int32) -> int:
        return blocks.size + self.tables * int(np.count_nonzero(self.pages[blocks, 0]))

    def _emptied(self, blocks: Int32) -> None:
        loose = blocks[self._is_loose[blocks]]
        self._is_loose[loose] = False
        self._loose -= loose.size * self.tables

    def _push(self, blocks: Int32) -> None:
        pages = self.pages[blocks]
        self.pages[blocks] = 0
        super()._push(blocks)
        super()._push(pages[pages > 0])

    def _detach(self, blocks: Int32) -> None:
        """Frees the window pages of loose blocks."""
        pages = self.pages[blocks].reshape(-1)
        self.pages[blocks] = 0
        self._is_loose[blocks] = False
        self._loose -= pages.size
        super()._push(pages)

    def check(self) -> None:
        stack, attached = self._stack[: self._top], self.pages[self.pages > 0]
        everything = np.concatenate((stack, attached, np.flatnonzero((self.refs > 0) | self.kept)))
        assert np.array_equal(np.sort(everything), np.arange(self.num_blocks)), (
            "a page is lost, or in two places"
        )
        assert ((self.pages > 0).all(1) | (self.pages == 0).all(1)).all(), (
            "a block has some of its pages"
        )
        assert (self.pages[stack] == 0).all(), "a free block has pages"
        idle = np.flatnonzero((self.refs == 0) & self.kept).astype(np.int32)
        assert self._idle == self._weight(idle), "the idle count is off"
        loose = np.flatnonzero(self._is_loose)
        assert (self.refs[loose] > 0).all() and (self.pages[loose] > 0).all(), (
            "a loose block is idle, or has no pages"
        )
        assert self._loose == loose.size * self.tables, "the loose count is off"
        assert self.refs.min() >= 0, "a block was released too often"
