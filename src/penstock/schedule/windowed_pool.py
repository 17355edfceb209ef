"""WindowedPool: blocks of a model in which some layers see a window only, out of one pool of equal
pages.

    block   a page by its own number, for the layers that see everything
    pages   window_tables more, for layers with windows; `pages[block]` names them, 0: they are gone

A row that has moved on needs a block's window pages no more: they become loose, and whoever finds
the free ones gone takes them, before anything of the prefix tree is evicted. The device runs steps
in order, so a page may be handed on while flights that read it are in the air; it is cleared on the
way (StepPlan.window_pages). A block that somebody else holds too keeps its pages until it is idle.

It knows blocks, pages and rows' columns; no layers. docs/design/kv_by_layer.md says why it is so.
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
    """Returns the pool that such a device has."""
    if not limits.window_tables:
        return BlockPool(limits.num_blocks)
    return WindowedPool(limits.num_blocks, limits.window, limits.window_tables)


class WindowedPool(BlockPool):
    """A pool of `num_blocks` pages, the scratch block included. window: tokens that a token sees,
    itself included."""

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
        # held, by nobody who needs a window of it
        self._is_loose: Bool = np.full(num_blocks, False, np.bool_)
        self._loose = 0  # pages of such blocks
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
        """Returns blocks [n, 1 + tables] that were given since the last call, each with its pages
        behind it."""
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
        """One more reference to each; the last ones' pages are needed again,
        the others' are not."""
        self.share(blocks)
        near = blocks[-self.near :]
        loose = near[self._is_loose[near]]
        self._is_loose[loose] = False
        self._loose -= loose.size * self.tables
        self.loosen(blocks[: -self.near])

    def loosen(self, blocks: Int32) -> None:
        """Whoever holds `blocks` (any of them several times) needs their windows no more."""
        alone = (self.refs[blocks] == 1) & (self.pages[blocks, 0] > 0) & ~self._is_loose[blocks]
        loose = self._distinct(blocks[alone])
        self._is_loose[loose] = True
        self._loose += loose.size * self.tables

    def pass_prompt(self, blocks: Int32, passed: int, position: int) -> int:
        """A prompt's next chunk begins at `position`; returns how many of its blocks are passed by
        now."""
        reached = max(passed, self.past(position))
        self.loosen(blocks[passed:reached])
        return reached

    def pass_rows(self, rows: Int32, columns: Rows) -> None:
        """Running rows [k] have moved on. Blocks that tails share stay as far as a tail to come may
        need them; a request's only sample passes its prompt's too."""
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
        """Returns for rows [k] the pages that are theirs alone, and by how many blocks their
        windows will yet grow."""
        blocks, shared, passed = columns.blocks[rows], columns.shared[rows], columns.passed[rows]
        near = blocks - np.maximum(shared, passed)
        window = np.where(columns.single[rows], blocks - passed, near)
        return blocks - shared + self.tables * near, np.maximum(self.near + 2 - window, 0).astype(
            np.int32
        )

    def _at_once(self, pages: int) -> int:
        """Blocks to look for where so many pages are missing: a few more than asked, since looking
        costs O(blocks)."""
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
        """Gives loose pages away."""
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
