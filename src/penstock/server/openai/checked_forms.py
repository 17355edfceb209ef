"""CheckedForms: cache of answer formats known to be valid. Agents send the same tools with every
request, and a check takes milliseconds in a sandbox. Knows only digests of the formats."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import msgspec

from penstock.request import StructuredOutputsParams

KEPT = 4_096  # most answer formats that are remembered as valid


class CheckedForms:
    """The most recent valid answer formats of one server."""

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def has(self, form: StructuredOutputsParams) -> bool:
        """Returns True if the format was found valid before."""
        key = _digest(form)
        if key in self._seen:
            self._seen.move_to_end(key)
        return key in self._seen

    def add(self, form: StructuredOutputsParams) -> None:
        """Remembers that the answer format is valid."""
        self._seen[_digest(form)] = None
        if len(self._seen) > KEPT:
            self._seen.popitem(last=False)


def _digest(form: StructuredOutputsParams) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(form), digest_size=16).digest()
