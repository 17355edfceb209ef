"""GroupTexts: texts of ended samples that the device keeps for drafts. Samples of the request that
still run look for their last tokens in them (`--draft-from group`).

A request of several samples has one slot of the device while it runs, if one is free; its newest
WIDTH tokens stay. Texts follow each other without a border: a guess across one is wrong, which
costs a query. Knows requests and tokens; not how they are looked through.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from penstock.schedule.request_state import RequestState
from penstock.schedule.step import Int32, Int64, Texts

SLOTS = 256  # requests whose texts are kept
WIDTH = 16_384  # tokens of each: 16 MiB in all


class GroupTexts:
    """The texts' slots. slots: their number, width: tokens of each."""

    def __init__(self, slots: int = SLOTS, width: int = WIDTH) -> None:
        self._width = width
        self._free = list(range(slots))
        self._written = np.zeros(slots, np.int64)  # tokens written to each slot for its request
        # slot -> texts that the device hasn't got yet; none: the slot begins anew
        self._new: dict[int, deque[Int32]] = {}
        self._held = np.zeros(slots, np.int64)  # tokens of these texts

    def join(self, live: RequestState) -> None:
        """Gives a slot to a request of several samples that has none, if one is free."""
        if live.outstanding > 1 and live.record["text_slot"][0] < 0 and self._free:
            slot = self._free.pop()
            live.record["text_slot"] = slot
            self._written[slot] = self._held[slot] = 0
            self._new[slot] = deque()

    def ended(self, live: RequestState, tokens: Int32) -> None:
        """Takes the tokens of a sample that ended, for samples of the request that go on."""
        slot = int(live.record["text_slot"][0])
        if slot < 0:
            return
        texts = self._new.setdefault(slot, deque())
        texts.append(tokens)
        self._held[slot] += tokens.size
        # the device takes no more than the newest
        while self._held[slot] - texts[0].size >= self._width:
            dropped = texts.popleft().size
            self._written[slot] += dropped
            self._held[slot] -= dropped

    def forget_all(self) -> None:
        """Begins all texts anew: the device has lost what it had."""
        self._written[:] = 0

    def leave(self, live: RequestState) -> None:
        """Takes back the slot of a request that is over."""
        slot = int(live.record["text_slot"][0])
        if slot >= 0:
            live.record["text_slot"] = -1
            self._new.pop(slot, None)
            self._free.append(slot)

    def launched(self) -> Texts | None:
        """Returns the tokens that the device hasn't got, for the step that is launched now."""
        if not self._new:
            return None
        places, kept, filled = list[Int64](), list[Int32](), list[int]()
        for slot, told in self._new.items():
            tokens = np.concatenate([np.zeros(0, np.int32), *told])
            self._written[slot] += tokens.size
            kept.append(tokens[-self._width :])  # places are distinct: all ranks keep the same
            at = np.arange(self._written[slot] - kept[-1].size, self._written[slot])
            places.append(slot * self._width + at % self._width)
            filled.append(min(int(self._written[slot]), self._width))
        slots = np.array([*self._new], np.int64)
        self._new = {}
        self._held[:] = 0
        return Texts(
            np.concatenate(places), np.concatenate(kept), slots, np.array(filled, np.int32)
        )
