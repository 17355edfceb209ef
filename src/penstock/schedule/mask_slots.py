"""MaskSlots: assigns slots in the device's mask pool. It also lists the token masks to write with
each step.

    rows with equal static masks (allowed_token_ids)   one shared slot, written when the first joins
    a row with a constraint                            a slot of its own, written before each draw

A slot is free after its last row, once every step in flight that names the row has been read. Knows
rows, token ids and constraints; no blocks, no text.
"""

from __future__ import annotations

import numpy as np

from penstock.mask_board import AS_IT_STANDS
from penstock.schedule.mask_makers import Guide, MaskMakers, MasksHere
from penstock.schedule.request_state import RequestState
from penstock.schedule.rows import FREE, PREEMPTED, RUNNING, Rows
from penstock.schedule.step import Bool, Drafts, Int32, Int64, LateMasks, Masks, StepPlan


class MaskSlots:
    """Assigns `count` mask slots to the rows of one scheduler."""

    def __init__(
        self,
        count: int,
        rows: Rows,
        vocabulary: int,
        makers: MaskMakers | None = None,
    ) -> None:
        self.rows, self.vocabulary = rows, vocabulary
        self.makers: MaskMakers = makers or MasksHere(vocabulary)
        self._free = list(range(count - 1, -1, -1))
        self._users: Int32 = np.zeros(count, np.int32)  # number of rows that use each slot
        self._static: dict[bytes, int] = {}  # allowed_token_ids, as bytes -> slot with their mask
        self._ids: dict[int, bytes] = {}  # slot -> allowed_token_ids that its rows share, as bytes
        self._fresh: list[int] = []  # slots of static masks that are not written on the device yet
        self._guides: dict[int, Guide] = {}  # row -> its sample's constraint
        # row -> its sample's index on the mask board, or -1
        self._place: Int32 = np.full(rows.count, -1, np.int32)
        # By board index: number of the board's forced tokens that launched draws contain, and
        # number of them that were read.
        self._said: Int32 = np.zeros(self.makers.places, np.int32)
        self._known: Int32 = np.zeros(self.makers.places, np.int32)
        # board index -> mask of allowed_token_ids of the sample's request
        self._allowed: dict[int, Int32] = {}

    def room(self, live: RequestState) -> int:
        """Returns how many of this request's samples may get rows, by the number of free mask
        slots."""
        if live.constrain is not None:
            return len(self._free)
        if live.allowed and live.allowed not in self._static and not self._free:
            return 0
        return self.rows.count

    def join(self, live: RequestState, rows: Int32, samples: Int32) -> None:
        """Gives slots to joining rows; the caller has checked `room`."""
        shared = rows
        if live.constrain is not None:
            due: list[Guide] = []
            for row, sample in zip(rows.tolist(), samples.tolist(), strict=True):
                guide = self._guide_of(live, sample)
                if guide is not None:
                    self._guides[row], self._place[row] = guide, guide.place
                    self._give(self._free.pop(), np.array([row], np.int32))
                    told = self._said[guide.place] == self._known[guide.place]
                    assert told, "a row comes back before its tokens were read"
                    # not for a sample that was preempted and has a mask already
                    if not guide.begun:
                        due.append(guide)
            self._start([guide.place for guide in due], [AS_IT_STANDS] * len(due))
            for guide in due:
                guide.begun = True
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
        """Takes back the slots of rows that no step in flight names."""
        rows = rows[self.rows.mask_slot.take(rows) >= 0]
        if not rows.size:
            return
        slots, counts = np.unique(self.rows.mask_slot[rows], return_counts=True)
        self._users[slots] -= counts.astype(np.int32)
        self.rows.mask_slot[rows] = -1
        constrained = rows[self.rows.constrained[rows]]
        guides = [self._guides.pop(row) for row in constrained.tolist()]
        ended = self.rows.state[constrained] != PREEMPTED
        self._end([guide for guide, over in zip(guides, ended.tolist(), strict=True) if over])
        self.rows.constrained[rows] = False
        self._place[rows] = -1
        for slot in slots[self._users[slots] == 0].tolist():
            self._free.append(slot)
            if slot in self._ids:
                del self._static[self._ids.pop(slot)]

    def forget(self, live: RequestState) -> None:
        """Ends the constraints of a request whose samples have all ended."""
        self._end([guide for guide in live.guides.values() if guide is not None])

    def _end(self, guides: list[Guide]) -> None:
        going = [guide for guide in guides if not guide.over]
        for guide in going:
            guide.over = True
            self._allowed.pop(guide.place, None)
        if going:
            self.makers.end(np.array([guide.place for guide in going], np.int32))

    def _start(self, places: Int32 | list[int], tokens: Int32 | list[int]) -> None:
        if len(places):
            where = np.asarray(places, np.int32)
            self._said[where] = self._known[where] = 0
            self.makers.start(where, np.asarray(tokens, np.int32))

    def launchable(self, rows: Int32, read: int) -> Int32:
        """Returns the rows [k] without those whose mask needs a token that will not be read before
        this step draws. Step read + 1 will be; later steps will not."""
        if not self._guides:
            return rows
        waits = self.rows.constrained.take(rows) & (self.rows.last_flight.take(rows) > read + 1)
        return rows[~waits] if waits.any() else rows

    def accept(self, rows: Int64, tokens: Int32, goes_on: Bool) -> None:
        """Passes the tokens [k] that rows drew to their constraints, for rows that have not
        ended."""
        if not self._guides:
            return
        at = np.flatnonzero(self.rows.constrained.take(rows) & goes_on)
        places = self._place.take(rows[at])
        due: Bool = np.ones(at.size, np.bool_)
        counts = self.makers.board.count.take(places) if at.size else places
        for i in np.flatnonzero(counts).tolist():
            place = places[i]
            if self._known[place] < counts[i]:  # the mask maker knows this forced token already
                self._known[place] += 1
                due[i] = False
        self._start(places[due], tokens[at[due]])

    def masks(self) -> Masks | None:
        """Returns the static masks that a step needs and that have not been written to
        their slots."""
        if not self._fresh:
            return None
        slots, self._fresh = self._fresh, []
        return Masks(
            np.array(slots, np.int32), np.stack([self._words(self._ids[slot]) for slot in slots])
        )

    def guided(self, rows: Int32) -> Int32:
        """Returns the rows of [k] that have a constraint."""
        return rows[self.rows.constrained.take(rows)] if self._guides else rows[:0]

    @property
    def guides_any(self) -> bool:
        """Returns True if any row has a constraint (structured output)."""
        return bool(self._guides)

    def forced(self, rows: Int32, most: Int32) -> Drafts:
        """Returns, as drafts, tokens that the grammar forces after the tokens that this step draws
        for rows [k]; at most most[i] each."""
        start, tokens = np.zeros(rows.size + 1, np.int32), list[int]()
        if self._guides:
            at = np.flatnonzero(self.rows.constrained.take(rows) & (most > 0))
            places, board = self._place.take(rows[at]), self.makers.board
            left = (board.count.take(places) > self._said.take(places)) & board.ready(places)
            for i in np.flatnonzero(left).tolist():
                mine = self._coming(int(places[i]), int(most[at[i]]))
                tokens += mine
                start[at[i] + 1] = len(mine)
        return Drafts(np.cumsum(start, dtype=np.int32), np.array(tokens, np.int32))

    def _coming(self, place: int, most: int) -> list[int]:
        """Returns the forced tokens of a place that no launched step contains yet, at most
        `most`."""
        board, said = self.makers.board, int(self._said[place])
        coming: list[int] = board.certain[
            place, said : min(said + most, int(board.count[place]))
        ].tolist()
        return coming

    def late(self, plan: StepPlan) -> LateMasks:
        """Returns the masks for the late draw of a step. Rows that have ended, or whose mask is
        missing, draw no token in it."""
        at = np.flatnonzero(self.rows.constrained.take(plan.rows))
        rows, board = plan.rows[at], self.makers.board
        places = self._place.take(rows)
        drawn = board.ready(places) & (self.rows.state.take(rows) == RUNNING)
        first = at if plan.drafts is None else plan.drafts.query_start[at]
        queries = np.ones(at.size, np.int32) if plan.drafts is None else plan.drafts.counts[at] + 1
        where, tokens = list[int](), list[int]()
        for i in np.flatnonzero(
            drawn & (board.count.take(places) > self._said.take(places))
        ).tolist():
            said = self._coming(int(places[i]), int(queries[i]))
            self._said[places[i]] += len(said)
            tokens += said
            where += range(int(first[i]), int(first[i]) + len(said))
        mine = places[drawn]
        for place in self._allowed.keys() & set(mine.tolist()) if self._allowed else ():
            board.words[place] &= self._allowed[place]
        return LateMasks(
            slots=self.rows.mask_slot[rows[drawn]],
            places=mine,
            words=board.words,
            sit_out=rows[~drawn],
            forced=np.array(where, np.int64),
            tokens=np.array(tokens, np.int32),
        )

    def _guide_of(self, live: RequestState, sample: int) -> Guide | None:
        """Returns a sample's constraint (Guide); it is made once and kept when the row is
        preempted."""
        if live.constrain is not None and sample not in live.guides:
            constraint = live.constrain(sample)
            guide = live.guides[sample] = (
                None if constraint is None else Guide(self.makers.begin(constraint))
            )
            if guide is not None:
                self._said[guide.place] = self._known[guide.place] = 0
                if live.allowed:
                    self._allowed[guide.place] = self._words(live.allowed)
        return live.guides.get(sample)

    def _give(self, slot: int, rows: Int32) -> None:
        self.rows.mask_slot[rows] = slot
        self._users[slot] += rows.size

    def _words(self, allowed: bytes) -> Int32:
        """Returns a static mask, int32 [ceil(vocabulary / 32)]. allowed: allowed token ids as int32
        bytes; empty: all tokens."""
        bits: Bool = np.full(-(-self.vocabulary // 32) * 32, not allowed)
        bits[np.frombuffer(allowed, np.int32)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)

    def check(self) -> None:
        """Checks the invariants of slots and constraints; for tests."""
        assert len(set(self._free)) == len(self._free), "a mask slot is free twice"
        users = np.bincount(
            self.rows.mask_slot[self.rows.mask_slot >= 0], minlength=self._users.size
        )
        assert (users == self._users).all(), "a mask slot's users are miscounted"
        assert set(self._free) == set(np.flatnonzero(users == 0).tolist()), (
            "a mask slot is lost, or free and in use"
        )
        assert set(self._static.values()) == set(self._ids) and not set(self._ids) & set(self._free)
        constrained = np.flatnonzero(self.rows.constrained).tolist()
        assert set(constrained) == set(self._guides), "a constraint without a row"
        assert (self.rows.state[constrained] != FREE).all(), "a free row has a constraint"
