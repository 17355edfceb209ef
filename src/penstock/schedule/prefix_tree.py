"""PrefixTree: finds the blocks that hold the beginning of a prompt already.

A block's key is a hash of all tokens up to its end, made for a whole prompt at once (a polynomial in the block's index,
so that a chain is one cumulative sum). A hash only proposes: a hit counts when the block's tokens are the prompt's and
it was put behind the very entry before it, so an accidental or a made collision can never give foreign KV. Entries are
numbered and no number comes twice: a block that was evicted and used again is no longer the one its children followed.

It knows blocks and tokens; no rows, no requests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.config import BLOCK_SIZE
from penstock.schedule.blocks import BlockPool
from penstock.schedule.step import Int32, Int64

UInt64 = NDArray[np.uint64]

ROOT = 0  # the place before a chain's first block
NOWHERE = -1  # a place that nothing can follow


def root_of(salt: int) -> int:
    """The place before the first blocks of a salt's chains: no two salts have one, so none finds another's blocks. Keys
    differ too, by `base`; but a key only proposes."""
    return NOWHERE - salt if salt else ROOT


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
        # Full, not zeros: their pages come here, not at the first touch amid a step.
        self.place: Int64 = np.full(pool.num_blocks, 0, np.int64)  # the entry's number, 0: not in the tree
        self.parent: Int64 = np.full(pool.num_blocks, 0, np.int64)  # the number of the entry before it
        self.key_of: UInt64 = np.full(pool.num_blocks, 0, np.uint64)
        self._blocks: dict[int, int] = {}
        self._last = 0  # the last entry's number
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

    def match(self, tokens: Int32, keys: list[int], root: int = ROOT) -> Int32:
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
        parents = np.concatenate(([root], self.place[blocks[:-1]]))
        right = (self.slot_token[blocks] == tokens[: blocks.size]).all(axis=1) & (self.parent[blocks] == parents)
        return blocks if right.all() else blocks[: int(np.argmin(right))]

    def place_of(self, known: Int32, root: int = ROOT) -> int:
        """The place behind blocks that match() gave."""
        return int(self.place[known[-1]]) if known.size else root

    def insert(self, keys: list[int], blocks: list[int], place: int) -> int:
        """Takes held blocks that follow `place`; gives the last one's place.

        Contents that are known already stay with their block. Behind a block that cannot be put in its place, since its
        key is another content's, nothing is kept: NOWHERE.
        """
        if not self.enabled or place == NOWHERE:
            return place
        for key, block in zip(keys, blocks, strict=True):
            known = self._blocks.setdefault(key, block)
            if known == block:
                self._last += 1
                self.key_of[block], self.parent[block], self.place[block] = key, place, self._last
                self.pool.kept[block] = True
            elif self.parent[known] != place or (self.slot_token[known] != self.slot_token[block]).any():
                return NOWHERE
            place = int(self.place[known])
        return place

    def insert_chains(self, blocks: Int32, counts: Int32, firsts: Int32, bases: list[int], roots: list[int]) -> None:
        """Takes generated blocks of several sequences, laid end to end: counts[i] of them follow block firsts[i] - 1 of
        a chain whose sum so far is bases[i] and whose last place in the tree is roots[i]."""
        begins = np.cumsum(counts) - counts
        index = np.arange(blocks.size) + np.repeat(firsts - begins, counts)
        self._powers_to(int(index.max()) + 1)
        running = np.cumsum(_words(self.slot_token[blocks]) * self._powers[index], dtype=np.uint64)
        before = np.concatenate((np.zeros(1, np.uint64), running))[begins]
        sums = running - np.repeat(before, counts) + np.repeat(np.array(bases, np.uint64), counts)
        keys, numbers = self.keys(sums), blocks.tolist()
        for begin, count, root in zip(begins.tolist(), counts.tolist(), roots, strict=True):
            self.insert(keys[begin : begin + count], numbers[begin : begin + count], root)

    def drop(self, blocks: Int32) -> None:
        """Nobody finds `blocks`, nor what follows them, any more: what they hold is not to be trusted."""
        gone = blocks[self.place[blocks] > 0]
        while gone.size:
            places = self.place[gone]
            self._forget(gone)
            self.pool.unkeep(gone)
            gone = np.flatnonzero((self.place > 0) & np.isin(self.parent, places)).astype(np.int32)

    def _forget(self, blocks: Int32) -> None:
        for key in self.key_of[blocks].tolist():
            del self._blocks[key]
        self.place[blocks] = 0

    def _powers_to(self, count: int) -> UInt64:
        if count > self._powers.size:
            factors = np.full(max(count, 2 * self._powers.size), _BASE, np.uint64)
            factors[0] = 1
            self._powers = np.cumprod(factors, dtype=np.uint64)
        return self._powers[:count]

    def check(self) -> None:
        """Restates the invariants; for tests."""
        blocks = np.array(sorted(self._blocks.values()), np.int32)
        assert len(set(blocks.tolist())) == blocks.size, "a block stands under two keys"
        assert (np.flatnonzero(self.pool.kept) == blocks).all(), "pool and tree disagree on what is kept"
        assert all(int(self.key_of[block]) == key for key, block in self._blocks.items()), "a block's key is off"
        places = self.place[blocks]
        assert len(set(places.tolist())) == places.size and (places > 0).all(), "two entries have one number"
        assert (self.parent[blocks] < places).all(), "an entry came before its parent"
        assert np.count_nonzero(self.place) == blocks.size, "an evicted block has a place"
