"""KeySet: keys that were seen, few bytes each. A key is a JSON value that tells a row from all
others. Stdlib only."""

from __future__ import annotations

import json
from array import array
from hashlib import blake2b
from typing import Any

Key = str | int | list[Any]


class KeySet:
    """Keys that were seen, as 8-byte hashes in an open-addressed table: 16 to 32 bytes a key,
    however long it is.

    Two keys share a hash with a chance of about (keys squared) / 2^65: 3e-8 at a million keys.
    """

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 * 1024))
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: Key) -> bool:
        table = self._table
        return table[_place(table, _hash(key))] != 0

    def add(self, key: Key) -> bool:
        """Adds a key; False when it was there. For one thread;
        others may ask for keys meanwhile."""
        code = _hash(key)
        place = _place(self._table, code)
        if self._table[place]:
            return False
        self._table[place] = code
        self._size += 1
        if 2 * self._size > len(self._table):
            self._grow()
        return True

    def _grow(self) -> None:
        grown = array("Q", bytes(16 * len(self._table)))
        for code in filter(None, self._table):
            grown[_place(grown, code)] = code
        self._table = grown  # whole, at once: who asks in another thread misses no key


def _place(table: array[int], code: int) -> int:
    place = code & (mask := len(table) - 1)
    while table[place] not in (0, code):
        place = (place + 1) & mask
    return place


def text_of(key: Key) -> str:
    """Returns a key as a line holds it."""
    return json.dumps(key, separators=(",", ":"))  # ASCII, and no newline in it


def _hash(key: Key) -> int:
    # 0 marks an empty place
    return int.from_bytes(blake2b(text_of(key).encode(), digest_size=8).digest()) or 1
