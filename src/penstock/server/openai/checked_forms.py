"""Forms of answers that were looked at and can be served: agents send the same tools with every
request, and a look takes milliseconds of a sandbox. It knows digests alone.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import msgspec

from penstock.request import StructuredOutputsParams

KEPT = 4_096  # forms


class CheckedForms:
    """The last forms of one server that were found good."""

    def __init__(self) -> None:
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def has(self, form: StructuredOutputsParams) -> bool:
        """Returns whether it was found good before."""
        key = _digest(form)
        if key in self._seen:
            self._seen.move_to_end(key)
        return key in self._seen

    def add(self, form: StructuredOutputsParams) -> None:
        """Keeps that it is good."""
        self._seen[_digest(form)] = None
        if len(self._seen) > KEPT:
            self._seen.popitem(last=False)


def _digest(form: StructuredOutputsParams) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(form), digest_size=16).digest()
