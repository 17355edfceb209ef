"""PrefixTree: finds cached blocks of a prompt's beginning.

There is one entry per cached block. Its key is the block's tokens and the number of the entry
before it, so matches are exact: no block of another prefix is found. Entry numbers are never
reused, so entries that followed an evicted block are not found after its next content.

Knows blocks and tokens; no rows, no requests.
"""

from __future__ import annotations

import numpy as np

from penstock.config import BLOCK_SIZE
from penstock.request import MAX_SALT, MAX_TAG
from penstock.schedule.blocks import BlockPool
from penstock.schedule.state_slots import StateSlots
from penstock.schedule.step import Int32

_WORD = BLOCK_SIZE * np.dtype(np.int32).itemsize
Key = tuple[int, bytes]  # (number of the entry before, the block's tokens as bytes)


def words_of(tokens: Int32) -> list[bytes]:
    """Returns the tokens [n, 16] of n blocks as bytes, one per block, for keys."""
    data = tokens.tobytes()
    return [data[at : at + _WORD] for at in range(0, len(data), _WORD)]


class PrefixTree:
    """Finds blocks by their content. slot_token [blocks, 16]: the tokens of each block, shared with
    the scheduler.

    A place says where a block belongs: it is the number of the entry before it, or, for a first
    block, the `root` of the request's salt and tag. Requests with different salts or tags share no
    blocks; with tags the keys and values differ.
    """

    def __init__(
        self,
        pool: BlockPool,
        slot_token: Int32,
        enabled: bool = True,
        slots: StateSlots | None = None,
    ) -> None:
        """slots: slots of recurrent state, if the model has any."""
        self.enabled = enabled
        self.pool, self._slots = pool, slots
        self.slot_token = slot_token
        # key -> (block, the entry's number), in order of the entries' numbers
        self._entries: dict[Key, tuple[int, int]] = {}
        self._key_of: dict[int, Key] = {}  # block -> key under which it is in _entries
        self._last = 0  # number given to the latest of _entries
        self._resets = 0
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._entries)

    def root(self, salt: int, tag: int) -> int:
        """Returns the place of first blocks for a salt and a tag; it changes with each reset."""
        return -(salt + (tag + self._resets * (MAX_TAG + 1)) * (MAX_SALT + 1))

    def reset(self) -> None:
        """Empties the tree for later prompts: all present entries, and blocks later added after
        them, can no longer be found."""
        self._resets += 1
        every = np.array([*self._key_of], np.int32)
        self._forget(every)
        self.pool.unkeep(every)

    def match(self, words: list[bytes], place: int) -> tuple[Int32, int]:
        """Returns the blocks of the longest known beginning of `words` (as in words_of) after
        `place`, and the place after them. References to the blocks are not added. If layers have
        sliding windows, the last blocks have all their window pages; if layers have recurrent
        state, a snapshot of it is kept for the end of the last block."""
        found: list[int] = []
        near, paged, known, behind = self.pool.near, 0, 0, place
        for word in words:
            entry = self._entries.get((place, word))
            if entry is None:
                break
            block, place = entry
            found.append(block)
            paged = paged + 1 if not near or self.pool.is_whole(block) else 0
            if paged >= min(near, len(found)) and (self._slots is None or self._slots.has(place)):
                known, behind = len(found), place
        return np.array(found[:known], np.int32), behind

    def depth(self, words: list[bytes], place: int) -> int:
        """Returns the number of known blocks of a prompt after `place`, including blocks that
        match() may not return because a snapshot or window pages are missing."""
        for known, word in enumerate(words):
            entry = self._entries.get((place, word))
            if entry is None:
                return known
            place = entry[1]
        return len(words)

    def insert(self, words: list[bytes], blocks: list[int], place: int) -> int:
        """Inserts held blocks that follow `place`; returns the place after the last.

        Tokens that the tree knows already keep their old block.
        """
        fresh: list[int] = []
        for word, block in zip(words, blocks, strict=True):
            key = place, word
            entry = self._entries.get(key)
            if entry is None:
                self._last += 1
                entry = self._entries[key] = block, self._last
                self._key_of[block] = key
                fresh.append(block)
            elif self.pool.near and not self.pool.is_whole(entry[0]) and entry[0] != block:
                gone = entry[0]  # the new block replaces one that has lost its window pages
                entry = self._entries[key] = block, entry[1]
                del self._key_of[gone]
                self._key_of[block] = key
                self.pool.unkeep(np.array([gone], np.int32))
                fresh.append(block)
            place = entry[1]
        self.pool.kept[fresh] = True
        return place

    def insert_chains(self, blocks: Int32, counts: Int32, places: list[int]) -> None:
        """Inserts generated blocks of several sequences, concatenated: counts[i] of them follow
        places[i]."""
        words, numbers, first = words_of(self.slot_token[blocks]), blocks.tolist(), 0
        for count, place in zip(counts.tolist(), places, strict=True):
            last = first + count
            self.insert(words[first:last], numbers[first:last], place)
            first = last

    def drop(self, blocks: Int32) -> None:
        """Removes `blocks`, and all entries that follow them, from the tree: their content is
        invalid."""
        mistrusted = self._key_of.keys() & set(blocks.tolist())
        if not mistrusted:
            return
        gone, places = [], set()
        for (parent, _), (
            block,
            place,
            # an entry always comes later in this dict than the entry before it
        ) in self._entries.items():
            if block in mistrusted or parent in places:
                gone.append(block)
                places.add(place)
        forgotten = np.array(gone, np.int32)
        self._forget(forgotten)
        self.pool.unkeep(forgotten)

    def _forget(self, blocks: Int32) -> None:
        gone = [self._entries.pop(self._key_of.pop(block))[1] for block in blocks.tolist()]
        if self._slots is not None:
            self._slots.forget(gone)

    def check(self) -> None:
        """Checks the tree's invariants; for tests."""
        assert np.flatnonzero(self.pool.kept).tolist() == sorted(self._key_of), (
            "pool and tree disagree on what is kept"
        )
        held = {block: key for key, (block, _) in self._entries.items()}
        assert held == self._key_of, "a block's key is off"
        numbers = [number for _, number in self._entries.values()]
        assert numbers == sorted(set(numbers)) and min(numbers, default=1) > 0, (
            "two entries have one number"
        )
        assert all(place < number for (place, _), (_, number) in self._entries.items()), (
            "one came before its parent"
        )
