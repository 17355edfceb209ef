"""MaskSlots: who has which slot of the device's pool of token masks, and what goes into the slots with each step.

    rows of equal static masks (allowed_token_ids)   one slot together, written when the first of them joins
    a row with a constraint                          a slot of its own, written with each step of the row

A slot comes free with the last row that has it, once every flight that names that row has been read. It knows rows,
token ids and constraints; no blocks, no text.
"""

from __future__ import annotations

import numpy as np

from penstock.schedule.constraint import Constraint
from penstock.schedule.request_state import RequestState
from penstock.schedule.rows import FREE, Rows
from penstock.schedule.step import Bool, Int32, Int64, Masks


class MaskSlots:
    """`count` slots for the rows of one scheduler."""

    def __init__(self, count: int, rows: Rows, vocabulary: int) -> None:
        self.rows, self.vocabulary = rows, vocabulary
        self._free = list(range(count - 1, -1, -1))
        self._users: Int32 = np.zeros(count, np.int32)  # rows that have a slot
        self._static: dict[bytes, int] = {}  # allowed ids -> slot
        self._ids: dict[int, bytes] = {}  # slot -> the allowed ids that its rows share
        self._fresh: list[int] = []  # static slots that were given out and not sent yet
        self._constraints: dict[int, tuple[Constraint, bytes]] = {}  # row -> its own, and its request's allowed ids

    def room(self, live: RequestState) -> int:
        """Returns how many tails of this request the free slots are enough for."""
        if live.constrain is not None:
            return len(self._free)
        if live.allowed and live.allowed not in self._static and not self._free:
            return 0
        return self.rows.count

    def join(self, live: RequestState, rows: Int32, samples: Int32) -> None:
        """Gives slots to rows that join; there is `room`."""
        shared = rows
        if live.constrain is not None:
            for row, sample in zip(rows.tolist(), samples.tolist(), strict=True):
                constraint = live.constraint_of(sample)
                if constraint is not None:
                    self._constraints[row] = constraint, live.allowed
                    self._give(self._free.pop(), np.array([row], np.int32))
            self.rows.constrained[rows] = self.rows.mask_slot[rows] >= 0
            shared = rows[self.rows.mask_slot[rows] < 0]
        if live.allowed and shared.size:
            slot = self._static.get(live.allowed)
            if slot is None:
                slot = self._static[live.allowed] = self._free.pop()
                self._ids[slot] = live.allowed
                self._fresh.append(slot)
            self._give(slot, shared)

    def leave(self, rows: Int32) -> None:
        """Takes the slots of rows back that no flight to be read names."""
        rows = rows[self.rows.mask_slot[rows] >= 0]
        if not rows.size:
            return
        slots, counts = np.unique(self.rows.mask_slot[rows], return_counts=True)
        self._users[slots] -= counts.astype(np.int32)
        self.rows.mask_slot[rows] = -1
        for row in rows[self.rows.constrained[rows]].tolist():
            del self._constraints[row]
        self.rows.constrained[rows] = False
        for slot in slots[self._users[slots] == 0].tolist():
            self._free.append(slot)
            if slot in self._ids:
                del self._static[self._ids.pop(slot)]

    def launchable(self, rows: Int32, read: int) -> Int32:
        """Returns the rows [k] without those whose mask needs a token of a flight after `read`."""
        if not self._constraints:
            return rows
        waits = self.rows.constrained.take(rows) & (self.rows.last_flight.take(rows) > read)
        return rows[~waits] if waits.any() else rows

    def accept(self, rows: Int64, tokens: Int32, goes_on: Bool) -> None:
        """Tells constraints the tokens [k] that rows [k] were given, where the row goes on behind it."""
        if self._constraints:
            for at in np.flatnonzero(self.rows.constrained.take(rows) & goes_on).tolist():
                self._constraints[int(rows[at])][0].accept(int(tokens[at]))

    def masks(self, rows: Int32) -> Masks | None:
        """Returns what a step of `rows` needs in its slots and what is not there yet."""
        lines = {slot: self._words(self._ids[slot]) for slot in self._fresh}
        self._fresh.clear()
        if self._constraints:
            for row in rows[self.rows.constrained.take(rows)].tolist():
                constraint, allowed = self._constraints[row]
                words = constraint.mask()
                if words is None or allowed:
                    words = self._words(allowed) if words is None else self._words(allowed) & words
                lines[int(self.rows.mask_slot[row])] = words
        return Masks(np.array(list(lines), np.int32), np.stack(list(lines.values()))) if lines else None

    def _give(self, slot: int, rows: Int32) -> None:
        self.rows.mask_slot[rows] = slot
        self._users[slot] += rows.size

    def _words(self, allowed: bytes) -> Int32:
        """Returns a mask's words [ceil(vocabulary / 32)]; no ids: every token may come."""
        bits: Bool = np.full(-(-self.vocabulary // 32) * 32, not allowed)
        bits[np.frombuffer(allowed, np.int32)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)

    def check(self) -> None:
        """Restates the invariants; for tests."""
        assert len(set(self._free)) == len(self._free), "a mask slot is free twice"
        users = np.bincount(self.rows.mask_slot[self.rows.mask_slot >= 0], minlength=self._users.size)
        assert (users == self._users).all(), "a mask slot's users are miscounted"
        assert set(self._free) == set(np.flatnonzero(users == 0).tolist()), "a mask slot is lost, or free and in use"
        assert set(self._static.values()) == set(self._ids) and not set(self._ids) & set(self._free)
        constrained = np.flatnonzero(self.rows.constrained).tolist()
        assert set(constrained) == set(self._constraints), "a constraint without a row"
        assert (self.rows.state[constrained] != FREE).all(), "a free row has a constraint"
