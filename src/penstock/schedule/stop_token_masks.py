"""StopTokenMasks: token ids whose drawing sends a sample's tokens up at once, because they can end
a stop string.

One table of bits over the vocabulary for each distinct set, shared by the requests that bring it.
It knows ids alone.
"""

from __future__ import annotations

import numpy as np

from penstock.errors import UsageError
from penstock.schedule.step import Bool, Int32


class StopTokenMasks:
    """Tables by slot; a slot goes back when its last request has ended."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._bits: Bool = np.zeros((0, vocab_size), np.bool_)
        self._slots: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._users: dict[int, int] = {}
        self._free: list[int] = []

    def hold(self, packed: bytes) -> int:
        """The slot of a table (numpy.packbits of the vocabulary), made if it is new."""
        slot = self._slots.get(packed)
        if slot is None:
            slot = self._add(packed)
        self._users[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        self._users[slot] -= 1
        if not self._users[slot]:
            del self._slots[self._key_of.pop(slot)], self._users[slot]
            self._free.append(slot)

    def hits(self, slots: Int32, tokens: Int32) -> Bool:
        """Whether each token is one that its row's table watches."""
        return self._bits.reshape(-1).take(slots.astype(np.int64) * self.vocab_size + tokens)

    def _add(self, packed: bytes) -> int:
        bits = np.unpackbits(np.frombuffer(packed, np.uint8)).astype(np.bool_)
        if bits.size < self.vocab_size:
            raise UsageError(
                f"a watch table of {bits.size} bits doesn't cover {self.vocab_size} tokens"
            )
        if not self._free:
            grown = np.zeros((max(4, 2 * len(self._bits)), self.vocab_size), np.bool_)
            grown[: len(self._bits)] = self._bits
            self._free = list(range(len(grown) - 1, len(self._bits) - 1, -1))
            self._bits = grown
        slot = self._free.pop()
        self._bits[slot] = bits[: self.vocab_size]
        self._slots[packed], self._key_of[slot], self._users[slot] = slot, packed, 0
        return slot
