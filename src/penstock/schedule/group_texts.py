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
_MOST_WIDTHS = 8  # times WIDTH: most tokens that wait for a step that drafts; the newest are kept


class GroupTexts:
    """The texts' slots. slots: their number, width: tokens of each."""

    def __init__(self, slots: int = SLOTS, width: int = WIDTH) -> None:
        self._width = width
        self._free = list(range(slots))
        self._written = np.zeros(slots, np.int64)  # tokens written to each slot for its request
        self._began = set[int]()  # slots that begin anew with the next launch
        self._turn = np.zeros(slots, np.int64)  # number of the request that has the slot
        # slots and their turns [2, k], lengths [k] and tokens of texts that the device hasn't got
        # yet; tokens of all
        self._new = deque[tuple[Int64, Int32, Int32]]()
        self._held = 0

    def join(self, live: RequestState) -> None:
        """Gives a slot to a request of several samples that has none, if one is free."""
        if live.outstanding > 1 and live.record["text_slot"][0] < 0 and self._free:
            slot = self._free.pop()
            live.record["text_slot"] = slot
            self._written[slot] = 0
            self._began.add(slot)

    def ended(self, slots: Int64, lengths: Int32, tokens: Int32) -> None:
        """Takes the texts of k samples that ended, for samples of their requests that go on. slots,
        lengths: [k]; tokens: [total of lengths]."""
        self._new.append((np.stack((slots, self._turn[slots])), lengths, tokens))
        self._held += tokens.size
        # while nothing drafts
        while self._held - self._new[0][2].size >= _MOST_WIDTHS * self._width:
            self._held -= self._new.popleft()[2].size

    def forget_all(self) -> None:
        """Begins all texts anew: the device has lost what it had."""
        self._written[:] = 0

    def leave(self, live: RequestState) -> None:
        """Takes back the slot of a request that is over."""
        slot = int(live.record["text_slot"][0])
        if slot >= 0:
            live.record["text_slot"] = -1
            self._began.discard(slot)
            self._turn[slot] += 1
            self._free.append(slot)

    def launched(self) -> Texts | None:
        """Returns the tokens that the device hasn't got, for the step that is launched now."""
        if not self._new and not self._began:
            return None
        none = np.zeros((2, 0), np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32)
        slots, lengths, tokens = (
            np.concatenate(parts, axis=-1) for parts in zip(none, *self._new, strict=True)
        )
        # sorted by slot, each in the order of ends, without those of requests that are over
        stays = self._turn[slots[0]] == slots[1]
        of = np.repeat(np.where(stays, slots[0], -1), lengths)
        order = np.argsort(of.astype(np.int16), kind="stable")[np.count_nonzero(of < 0) :]
        of, tokens = of[order], tokens[order]
        counts = np.bincount(of, minlength=self._written.size)
        behind = np.cumsum(counts)[of] - np.arange(of.size)  # newer tokens of the slot, and itself
        at = (self._written + counts)[of] - behind
        self._written += counts
        kept = behind <= self._width  # places are distinct: all ranks keep the same
        fresh = np.array(sorted(self._began | {*np.flatnonzero(counts).tolist()}), np.int64)
        filled = np.minimum(self._written[fresh], self._width).astype(np.int32)
        places = of[kept] * self._width + at[kept] % self._width
        self._new.clear()
        self._began.clear()
        self._held = 0
        return Texts(places, tokens[kept], fresh, filled)
