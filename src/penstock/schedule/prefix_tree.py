"""PrefixTree: finds the blocks that hold the beginning of a prompt already.

A block's key is a hash of all tokens up to its end, made for a whole prompt at once (a polynomial in the block's index,
so that a chain is one cumulative sum). A hash only proposes: a hit counts when the block's tokens are the prompt's and
its parent is the block before, so an accidental or a made collision can never give foreign KV.

It knows blocks and tokens; no rows, no requests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.config import BLOCK_SIZE
from penstock.schedule.blocks import BlockPool
from penstock.schedule.step import SCRATCH_BLOCK, Int32

UInt64 = NDArray[np.uint64]

_LANES: UInt64 = np.random.default_rng(0x5045_4E53).integers(1, 2**63, BLOCK_SIZE, dtype=np.uint64) * np.uint64(
    2
) + np.uint64(1)
_BASE = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _mixed(x: UInt64) -> UInt64:
    """splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _M1
    x = (x ^ (x >> np.uint64(27))) * _M2
    return x ^ (x >> np.uint64(31))


def _words(tokens: Int32) -> UInt64:
    """One word for each block of `tokens [n, 16]`."""
    return _mixed(_mixed((tokens.astype(np.uint64) + np.uint64(1)) * _LANES).sum(axis=1, dtype=np.uint64))


class PrefixTree:
    """Blocks by what they hold. `slot_token [blocks, 16]` is the pool's token geometry, shared with the scheduler."""

    def __init__(self, pool: BlockPool, slot_token: Int32, enabled: bool = True) -> None:
        self.enabled = enabled
        self.pool = pool
        self.slot_token = slot_token
        self.parent: Int32 = np.zeros(pool.num_blocks, np.int32)
        self.key_of: UInt64 = np.zeros(pool.num_blocks, np.uint64)
        self._blocks: dict[int, int] = {}
        self._powers: UInt64 = np.ones(1, np.uint64)
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._blocks)

    def sums(self, tokens: Int32, first: int = 0, base: int = 0) -> UInt64:
        """Running sums of `tokens [n, 16]`, blocks first, first + 1, ... of a chain whose sum before them is `base`."""
        powers = self._powers_to(first + len(tokens))[first:]
        return np.cumsum(_words(tokens) * powers, dtype=np.uint64) + np.uint64(base)

    @staticmethod
    def keys(sums: UInt64) -> list[int]:
        result: list[int] = _mixed(sums).tolist()
        return result

    def match(self, tokens: Int32, keys: list[int]) -> Int32:
        """Blocks (not referenced yet) that hold the longest known beginning of `tokens [n, 16]`."""
        found: list[int] = []
        for key in keys if self.enabled else ():
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        blocks = np.array(found, np.int32)
        if not found:
            return blocks
        parents = np.concatenate(([SCRATCH_BLOCK], blocks[:-1]))
        right = (self.slot_token[blocks] == tokens[: blocks.size]).all(axis=1) & (self.parent[blocks] == parents)
        return blocks if right.all() else blocks[: int(np.argmin(right))]

    def insert(self, keys: list[int], blocks: list[int], parent: int) -> int:
        """Takes held blocks that follow `parent` (the scratch block: a root); gives the last one's place in the tree.

        Contents that are known already stay with their block.
        """
        if not self.enabled:
            return parent
        for key, block in zip(keys, blocks, strict=True):
            known = self._blocks.setdefault(key, block)
            if known == block:
                self.parent[block] = parent
                self.key_of[block] = key
                self.pool.keep(block)
            parent = known
        return parent

    def insert_chains(
        self, blocks: Int32, counts: list[int], firsts: list[int], bases: list[int], roots: list[int]
    ) -> None:
        """Takes generated blocks of several sequences, laid end to end: counts[i] of them follow block firsts[i] - 1 of
        a chain whose sum so far is bases[i] and whose last place in the tree is roots[i]."""
        counted = np.array(counts)
        begins = np.cumsum(counted) - counted
        index = np.arange(blocks.size) + np.repeat(np.array(firsts) - begins, counted)
        self._powers_to(int(index.max()) + 1)
        running = np.cumsum(_words(self.slot_token[blocks]) * self._powers[index], dtype=np.uint64)
        before = np.concatenate((np.zeros(1, np.uint64), running))[begins]
        sums = running - np.repeat(before, counted) + np.repeat(np.array(bases, np.uint64), counted)
        keys, numbers = self.keys(sums), blocks.tolist()
        for begin, count, root in zip(begins.tolist(), counts, roots, strict=True):
            self.insert(keys[begin : begin + count], numbers[begin : begin + count], root)

    def forget(self, blocks: Int32) -> None:
        """Takes blocks out that must not be found any more; they stay held by whoever holds them."""
        kept = blocks[self.pool.kept[blocks]]
        self.pool.kept[kept] = False
        self._forget(kept)

    def _forget(self, blocks: Int32) -> None:
        for key in self.key_of[blocks].tolist():
            del self._blocks[key]

    def _powers_to(self, count: int) -> UInt64:
        if count > self._powers.size:
            factors = np.full(max(count, 2 * self._powers.size), _BASE, np.uint64)
            factors[0] = 1
            self._powers = np.cumprod(factors, dtype=np.uint64)
        return self._powers[:count]

    def check(self) -> None:
        """Restates the invariants; for tests."""
        blocks = np.array(sorted(self._blocks.values()), np.int32)
        assert np.unique(blocks).size == blocks.size, "a block stands under two keys"
        assert (np.flatnonzero(self.pool.kept) == blocks).all(), "pool and tree disagree on what is kept"
        assert all(int(self.key_of[block]) == key for key, block in self._blocks.items()), "a block's key is off"
