"""StopTokenMasks: token ids that can end a stop string. When a sample draws one, its tokens are
sent to the client at once, which searches the text for the stop string.

There is one bit table over the vocabulary per distinct set of ids; requests with equal sets share
it. Knows ids alone.
"""

from __future__ import annotations

import numpy as np

from penstock.errors import UsageError
from penstock.schedule.step import Bool, Int32


class StopTokenMasks:
    """Bit tables of token ids, by slot; a slot is freed when its last request has ended."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._bits: Bool = np.zeros((0, vocab_size), np.bool_)
        self._slots: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._users: dict[int, int] = {}
        self._free: list[int] = []

    def hold(self, packed: bytes) -> int:
        """Returns the slot of a table (numpy.packbits over the vocabulary); adds the table if it is
        new."""
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
        """Returns, per token, True if it is in the table of its row's slot."""
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
