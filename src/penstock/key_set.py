"""KeySet: a set of keys in little memory. A key is a JSON value that identifies a row of a file.
Stdlib only."""

from __future__ import annotations

import json
from array import array
from hashlib import blake2b
from typing import Any

Key = str | int | list[Any]


class KeySet:
    """A set of keys, stored as 8-byte hashes in an open-addressed table. It takes 16 to 32 bytes
    per key, however long the key is.

    Two keys share a hash with a chance of about (number of keys squared) / 2^65: 3e-8 at a million
    keys.
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
        """Adds a key; returns False when it was there. Only one thread may add; others may look up
        keys meanwhile."""
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
        self._table = grown  # one assignment, so that a lookup in another thread misses no key


def _place(table: array[int], code: int) -> int:
    place = code & (mask := len(table) - 1)
    while table[place] not in (0, code):
        place = (place + 1) & mask
    return place


def text_of(key: Key) -> str:
    """Returns a key as compact JSON for a journal line."""
    return json.dumps(key, separators=(",", ":"))  # ASCII without a newline


def _hash(key: Key) -> int:
    # 0 marks an empty place, so a hash of 0 becomes 1
    return int.from_bytes(blake2b(text_of(key).encode(), digest_size=8).digest()) or 1
