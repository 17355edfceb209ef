"""BlockPool: which blocks of KV are free, held, or kept for an equal prompt to come.

A block is in one of three states: free (on the stack), held (refs > 0), or idle (refs 0, but kept
by the prefix tree: found again by an equal prompt, or evicted, oldest first, when the stack runs
dry). Whole-array operations throughout. It knows no rows and no tokens. Block 0 is the scratch
block and never leaves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.errors import CapacityError
from penstock.schedule.step import SCRATCH_BLOCK, Bool, Int32, Int64


class BlockPool:
    """A pool of `num_blocks` blocks, the scratch block included."""

    def __init__(self, num_blocks: int, on_evict: Callable[[Int32], None] | None = None) -> None:
        if num_blocks < 2:
            raise CapacityError(
                f"a KV pool of {num_blocks} blocks holds nothing: give it more --kv-cache-tokens"
            )
        self.num_blocks = num_blocks
        # Full, not zeros: those get their pages at the first touch, amid a step (a release of 1,000
        # blocks: 9 ms).
        self.refs: Int32 = np.full(num_blocks, 0, np.int32)
        self.refs[SCRATCH_BLOCK] = 1
        # in the prefix tree, which sets it: once released these stay idle instead of free
        self.kept: Bool = np.full(num_blocks, False, np.bool_)
        self.stamp: Int64 = np.full(num_blocks, 0, np.int64)  # when an idle block was last held
        self.on_evict = on_evict
        self._stack: Int32 = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        # entries of the stack that are free; the scratch block lies above them
        self._top = num_blocks - 1
        self._idle = 0
        self._tick = 0
        self._mark: Int32 = np.full(num_blocks, 0, np.int32)

    # pages of the pool that a block takes: one, but where layers have windows (windowed_pool.py)
    per_block = 1
    near = 0  # blocks behind a token that layers with windows need; 0: there are none

    @property
    def available(self) -> int:
        """Blocks that take() can give: the free and the idle ones."""
        return self._top + self._idle

    @property
    def free(self) -> int:
        """Blocks that take() gives without evicting any."""
        return self._top

    @property
    def held(self) -> int:
        """Pages that nobody else could have now."""
        return self.num_blocks - 1 - self.available

    def take(self, count: int) -> Int32:
        """Gives `count` blocks, each with one reference. The caller has looked at `available`."""
        if count > self._top:
            self._evict(count - self._top)
        if count > self._top:
            raise CapacityError(f"the KV pool was asked for {count} blocks and has {self._top}")
        self._top -= count
        blocks = self._stack[self._top : self._top + count].copy()
        self.refs[blocks.astype(np.intp)] = 1
        return blocks

    def share(self, blocks: Int32) -> None:
        """One more reference to each of `blocks` (distinct ones)."""
        self._idle -= self._weight(blocks[self.refs[blocks] == 0])
        self.refs[blocks] += 1

    def share_beginning(self, blocks: Int32) -> None:
        """Shares blocks that the tree found at the beginning of a prompt."""
        self.share(blocks)

    def is_whole(self, block: int) -> bool:
        """Whether all layers find their K and V of it."""
        return True

    def past(self, position: int) -> int:
        """Returns how many leading blocks of a table layers with windows don't need from this
        position on."""
        return 0

    def copies(self, source: Int32, target: Int32) -> list[Int32]:
        """Returns the copies [n, 2] that give each target what its source holds."""
        return [np.stack((source, target), axis=1)]

    def release(self, blocks: Int32) -> None:
        """One reference less for each entry of `blocks`; a block may stand in it several times."""
        if not blocks.size:
            return
        # In just these types numpy has a fast way: 1,000 blocks take 2 us, and 40 with blocks of
        # int32.
        places = blocks.astype(np.intp)
        np.subtract.at(self.refs, places, np.int32(1))
        empty = self._distinct(blocks[self.refs.take(places) == 0])
        self._emptied(empty)
        kept = self.kept.take(empty)
        idle, free = empty[kept], empty[~kept]
        self._tick += 1
        # Deeper blocks stand later in a chain: they go first, so that a kept chain is eaten from
        # its end.
        self.stamp[idle] = self._tick * self.num_blocks - np.arange(idle.size)
        self._idle += self._weight(idle)
        self._push(free)

    def unkeep(self, blocks: Int32) -> None:
        """The prefix tree lets go of `blocks` (distinct ones, kept): they are free now, or once
        they are released."""
        self.kept[blocks] = False
        idle = blocks[self.refs[blocks] == 0]
        self._idle -= self._weight(idle)
        self._push(idle)

    def _push(self, blocks: Int32) -> None:
        self._stack[self._top : self._top + blocks.size] = blocks
        self._top += blocks.size

    def _weight(self, blocks: Int32) -> int:
        """Pages that blocks take."""
        return blocks.size

    def _emptied(self, blocks: Int32) -> None:
        """Nobody holds `blocks` any more."""

    def _distinct(self, blocks: Int32) -> Int32:
        """Drops repeats in O(n): of equal entries the one that wrote its mark last stays."""
        where, order = blocks.astype(np.intp), np.arange(blocks.size, dtype=np.int32)
        self._mark[where] = order
        last: Int32 = blocks[self._mark.take(where) == order]
        return last

    def _evict(self, count: int) -> None:
        """Frees at least `count` idle blocks, oldest first; a few more than asked, since looking
        costs O(blocks)."""
        idle = np.flatnonzero((self.refs == 0) & self.kept).astype(np.int32)
        count = min(max(count, self.num_blocks // 64), idle.size)
        if not count:
            return
        if count < idle.size:
            idle = idle[np.argpartition(self.stamp[idle], count - 1)[:count]]
        self.kept[idle] = False
        self._idle -= self._weight(idle)
        if self.on_evict is not None:
            self.on_evict(idle)
        self._push(idle)

    def check(self) -> None:
        """Restates the invariants; for tests."""
        stack = self._stack[: self._top]
        assert len(set(stack.tolist())) == stack.size, "a block is free twice"
        assert not stack.size or stack.min() > SCRATCH_BLOCK, "the scratch block is free"
        assert (self.refs[stack] == 0).all(), "a free block is held"
        assert not self.kept[stack].any(), "a free block is kept"
        assert self.refs.min() >= 0, "a block was released too often"
        assert self._idle == np.count_nonzero((self.refs == 0) & self.kept), "the idle count is off"
        assert self._top + self._idle + np.count_nonzero(self.refs > 0) == self.num_blocks, (
            "a block is lost"
        )
