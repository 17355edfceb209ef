"""BlockPool: the KV cache blocks and their reference counts.

A block is free (on the stack of free blocks), held (referenced by a request), or idle:
unreferenced, but kept in the prefix tree, where an equal prompt finds it. When the stack is empty,
idle blocks are evicted, the longest unused first. All operations work on whole arrays. Knows no
rows and no tokens. Block 0 is the scratch block and is never given out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.errors import CapacityError
from penstock.schedule.step import SCRATCH_BLOCK, Bool, Int32, Int64


class BlockPool:
    """Pool of `num_blocks` blocks, the scratch block included."""

    def __init__(self, num_blocks: int, on_evict: Callable[[Int32], None] | None = None) -> None:
        if num_blocks < 2:
            raise CapacityError(
                f"a KV pool of {num_blocks} blocks holds nothing: give it more --kv-cache-tokens"
            )
        self.num_blocks = num_blocks
        # np.full, not np.zeros: zeros gets its memory pages at the first write, in the middle of a
        # step (a release of 1,000 blocks took 9 ms)
        self.refs: Int32 = np.full(num_blocks, 0, np.int32)
        self.refs[SCRATCH_BLOCK] = 1
        # True for blocks in the prefix tree, which sets this; when released they become idle
        # instead of free
        self.kept: Bool = np.full(num_blocks, False, np.bool_)
        # time (in ticks) at which an idle block was released
        self.stamp: Int64 = np.full(num_blocks, 0, np.int64)
        self.on_evict = on_evict
        self._stack: Int32 = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        # number of free blocks on the stack; the scratch block lies above them
        self._top = num_blocks - 1
        self._idle = 0
        self._tick = 0
        self._mark: Int32 = np.full(num_blocks, 0, np.int32)

    # pages per block: 1, or more if layers have sliding windows (windowed_pool.py)
    per_block = 1
    near = 0  # number of blocks before a token that sliding windows reach; 0: no windows

    @property
    def available(self) -> int:
        """Number of free and idle blocks, which take() can give."""
        return self._top + self._idle

    @property
    def free(self) -> int:
        """Number of blocks that take() can give without evicting cached blocks."""
        return self._top

    @property
    def held(self) -> int:
        """Number of pool pages that requests hold."""
        return self.num_blocks - 1 - self.available

    def take(self, count: int) -> Int32:
        """Returns `count` blocks, each with one reference. The caller has checked `available`."""
        if count > self._top:
            self._evict(count - self._top)
        if count > self._top:
            raise CapacityError(f"the KV pool was asked for {count} blocks and has {self._top}")
        self._top -= count
        blocks = self._stack[self._top : self._top + count].copy()
        self.refs[blocks.astype(np.intp)] = 1
        return blocks

    def share(self, blocks: Int32) -> None:
        """Adds one reference to each of `blocks`, which are distinct."""
        self._idle -= self._weight(blocks[self.refs[blocks] == 0])
        self.refs[blocks] += 1

    def share_beginning(self, blocks: Int32) -> None:
        """Adds one reference to each of the blocks that the prefix tree found for the beginning of
        a prompt."""
        self.share(blocks)

    def is_whole(self, block: int) -> bool:
        """Returns True if this block has the keys and values of all layers."""
        return True

    def past(self, position: int) -> int:
        """Returns the number of leading blocks of a block table that sliding windows no longer
        reach from this position on."""
        return 0

    def copies(self, source: Int32, target: Int32) -> list[Int32]:
        """Returns the copies [n, 2] (source, target) that fill each target with its source's
        content."""
        return [np.stack((source, target), axis=1)]

    def release(self, blocks: Int32) -> None:
        """Removes one reference per entry of `blocks`; a block may appear several times."""
        if not blocks.size:
            return
        # numpy's fast path needs exactly these types: 1,000 blocks take 2 us, but 40 us with int32
        # indices.
        places = blocks.astype(np.intp)
        np.subtract.at(self.refs, places, np.int32(1))
        empty = self._distinct(blocks[self.refs.take(places) == 0])
        self._emptied(empty)
        kept = self.kept.take(empty)
        idle, free = empty[kept], empty[~kept]
        self._tick += 1
        # Later blocks of a released sequence get older stamps, so that its end is evicted
        # before its beginning.
        self.stamp[idle] = self._tick * self.num_blocks - np.arange(idle.size)
        self._idle += self._weight(idle)
        self._push(free)

    def unkeep(self, blocks: Int32) -> None:
        """Marks `blocks` (distinct, kept) as no longer in the prefix tree: they become free, at
        once or when released."""
        self.kept[blocks] = False
        idle = blocks[self.refs[blocks] == 0]
        self._idle -= self._weight(idle)
        self._push(idle)

    def _push(self, blocks: Int32) -> None:
        self._stack[self._top : self._top + blocks.size] = blocks
        self._top += blocks.size

    def _weight(self, blocks: Int32) -> int:
        """Number of pool pages that these blocks take."""
        return blocks.size

    def _emptied(self, blocks: Int32) -> None:
        """Hook for subclasses, called when `blocks` have lost their last reference."""

    def _distinct(self, blocks: Int32) -> Int32:
        """Returns `blocks` without repeats, in O(n): of equal entries the one whose mark was
        written last stays."""
        where, order = blocks.astype(np.intp), np.arange(blocks.size, dtype=np.int32)
        self._mark[where] = order
        last: Int32 = blocks[self._mark.take(where) == order]
        return last

    def _evict(self, count: int) -> None:
        """Frees at least `count` idle blocks, oldest first; a few more than needed, since a search
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
        """Checks the pool's invariants; for tests."""
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
