"""Drafting: draft tokens for the rows of a step. A draft is a drafter's guess, or a token that a
grammar forces.

Knows rows, drafters, and free room; not whether drafts turn out right.
"""

from __future__ import annotations

import numpy as np

from penstock.config import BLOCK_SIZE
from penstock.row_table import MAX_DRAFTS, MOST_SPECULATIVE_TOKENS
from penstock.schedule.admission import Piece
from penstock.schedule.draft_gate import MOST_ROWS
from penstock.schedule.group_texts import GroupTexts
from penstock.schedule.mask_slots import MaskSlots
from penstock.schedule.output_processor import OutputProcessor, Read
from penstock.schedule.request_state import Groups, RequestState
from penstock.schedule.rows import Rows
from penstock.schedule.step import Bool, Drafter, Drafts, Int32, Int64, StepPlan, Texts

# a step gets one forced token per so many rows without a constraint, so that forced tokens delay
# these rows only a little
_COMPANY = 48
# Texts are kept of samples that end in a step of at most so many rows. Nothing drafts beside many
# rows, and the texts of samples that end long before are not worth the host's time.
_TEXT_ROWS = 2 * MOST_ROWS


class Drafting:
    """Makes drafts for one scheduler's rows. queries: most queries of a step. states: True if rows
    have recurrent state, whose slots have room for drafts only where there is a drafter; without it
    no tokens are forced ahead."""

    def __init__(
        self,
        rows: Rows,
        mask_slots: MaskSlots,
        queries: int,
        states: bool = False,
    ) -> None:
        self.rows, self.mask_slots, self._states = rows, mask_slots, states
        self._queries = queries
        # set by who opens the engine; None: the only drafts are forced tokens
        self.drafter: Drafter | None = None
        # texts of ended samples, for their groups' drafts; None: not kept
        self.texts: GroupTexts | None = None
        # rows and requests of ended samples whose texts have not been read yet
        self._over: list[tuple[int, RequestState]] = []
        self._keeps = False  # True if texts of samples that end now are kept
        self.in_flight = 0  # steps with drafts that are launched and not read
        # most drafts of a row that the device makes after the step that was offered drafts last, and
        # True if a draft layer keeps up with that step's rows
        self.proposes, self.follows = 0, False
        # the drafter's drafts since the start: rows that had some, drafts, and by their place in a
        # row's drafts those that were right
        self.counts = {"drafts": 0, "tokens": 0}
        self.right: Int64 = np.zeros(MOST_SPECULATIVE_TOKENS, np.int64)

    @property
    def may(self) -> bool:
        """Returns True if any row may have drafts in flight."""
        return self.drafter is not None or (self.mask_slots.guides_any and not self._states)

    def offer(self, rows: Int32, lengths: Int32) -> Drafts | None:
        """Returns the drafts for the rows of a step; adds them to the rows' planned lengths, as if
        all were right.

        A row gets no more drafts than its last block has room for, and the step no more queries
        than it may have.
        """
        self.proposes, self.follows = 0, False
        if not rows.size or not self.may:
            return None
        drafter = self.drafter
        if drafter is not None and not drafter.wants(rows):
            self.follows, drafter = drafter.follows, None
        wanted = self.texts is not None and self.drafter is not None and not self.drafter.idle
        self._keeps = wanted and rows.size <= _TEXT_ROWS
        if drafter is None and not self.mask_slots.guides_any:
            return None
        columns = self.rows
        longest = MAX_DRAFTS if drafter is None else max(MAX_DRAFTS, drafter.most)
        ends = np.minimum(columns.limit.take(rows), columns.blocks.take(rows) * BLOCK_SIZE)
        most = np.clip(ends - lengths - 2, 0, longest).astype(np.int32)
        room, drafts = self._queries - rows.size, None
        if self.mask_slots.guides_any:
            guided = columns.constrained.take(rows)
            free = rows.size - int(np.count_nonzero(guided))
            forced = min(room, max(MAX_DRAFTS, free // _COMPANY)) if free else room
            forces = np.where(guided, np.minimum(most, MAX_DRAFTS), 0)
            drafts = self.mask_slots.forced(rows, _within(forces, forced))
            room -= int(drafts.start[-1])
            most[guided] = 0
        if drafter is not None:
            most = _within(np.minimum(most, drafter.most), room)
            own = drafter.offer(rows, lengths, most)
            self.proposes, self.follows = drafter.proposes, drafter.follows
            counts = own.counts
            self.counts["drafts"] += int(np.count_nonzero(counts))
            self.counts["tokens"] += int(own.start[-1])
            drafts = own if drafts is None else _joined(drafts, own)
        if drafts is None or not drafts.start[-1]:
            return None
        self.in_flight += 1
        counts = drafts.counts
        columns.planned_length[rows] += counts
        columns.drafted[rows] += counts
        return drafts

    def join(self, pieces: list[Piece]) -> None:
        """Gives the requests of joining rows room for their ended samples' texts."""
        if self.texts is not None:
            for piece in pieces:
                self.texts.join(piece.group.live)

    def fresh_texts(self) -> Texts | None:
        """Returns the texts of ended samples that the device gets with the next step: all new ones
        once it is to draft."""
        return self.texts.launched() if self.texts is not None and self.proposes else None

    def ended(self, lives: dict[int, RequestState]) -> None:
        """Keeps the texts of samples that ended, for the others of their requests. lives: their
        requests by row."""
        if self._keeps:
            self._over += lives.items()

    def read_texts(self, outputs: OutputProcessor) -> None:
        """Reads the texts of the samples that have ended, for the others of their requests. Call it
        before rows join, which may reuse theirs."""
        if self.texts is None or not self._over:
            return
        slots = [(int(live.record["text_slot"][0]), row) for row, live in self._over]
        over = np.array([pair for pair in slots if pair[0] >= 0], np.int64).reshape(-1, 2)
        self._over = []
        if over.size:
            self.texts.ended(over[:, 0], *outputs.texts_of(over[:, 1]))

    def forget(self, live: RequestState) -> None:
        """Drops the texts of a request that is over."""
        if self.texts is not None:
            self.texts.leave(live)

    def forget_texts(self) -> None:
        """Drops all texts, which the device loses with its other state."""
        if self.texts is not None:
            self.texts.forget_all()

    def read(self, plan: StepPlan, read: Read, groups: Groups) -> bool:
        """Takes in a step that was read: which drafts were right, and which samples ended. Returns
        True if these were the last drafts in flight: from now on planned lengths are exact."""
        if self._keeps and read.ended.size:
            of = self.rows.group[read.ended].tolist()
            self.ended(
                {row: groups[at].live for row, at in zip(read.ended.tolist(), of, strict=True)}
            )
        if plan.drafts is None or read.right is None:
            return False
        self.in_flight -= 1
        if self.drafter is not None:
            self._settle(self.drafter, plan.rows, plan.drafts, read.right)
        return not self.in_flight

    def _settle(self, drafter: Drafter, rows: Int32, drafts: Drafts, right: Int32) -> None:
        """Counts the drafter's drafts that were right."""
        own = ~self.rows.constrained.take(rows)
        right = right[own]
        drafter.settled(rows[own], drafts.counts[own], right)
        found = np.bincount(right, minlength=self.right.size + 1)
        # a row with n right drafts has one at each of the first n places
        self.right += np.cumsum(found[::-1])[::-1][1:]

    def stats(self) -> dict[str, float]:
        """Returns the counters of the drafter's drafts; {} without a drafter."""
        if self.drafter is None:
            return {}
        right = {f"spec_accepted_at_{at}": n for at, n in enumerate(self.right.tolist())}
        return {
            "spec_drafts": self.counts["drafts"],
            "spec_draft_tokens": self.counts["tokens"],
            "spec_accepted_tokens": sum(right.values()),
            **dict(list(right.items())[: self.drafter.most]),
        }

    def with_room(self, needs: Bool, runs: Bool, available: int) -> Bool:
        """Returns `needs`, the rows that need a block, and running rows whose next drafts would
        cross their last block's end. available: free blocks, of which drafts never take the last.
        """
        if self.drafter is None or not self.proposes:
            return needs
        columns = self.rows
        room, reach = columns.blocks * BLOCK_SIZE, columns.planned_length + 1 + self.drafter.reach
        more: Bool = needs | (reach >= room) & (room < columns.limit) & runs
        return more if np.count_nonzero(more) < available else needs

    def without_full(self, rows: Int32) -> Int32:
        """Returns the rows [k] without those that reach their limit if all their drafts in flight
        are right."""
        if not self.in_flight:
            return rows
        full: Bool = self.rows.planned_length.take(rows) + 1 >= self.rows.limit.take(rows)
        return rows[~full] if full.any() else rows


def _within(most: Int32, room: int) -> Int32:
    """Returns a count per row: most[i], cut so that the total is at most `room`; earlier rows are
    served first."""
    if int(most.sum()) <= room:
        return most
    least: Int32 = np.minimum(most, np.maximum(room - (np.cumsum(most) - most), 0)).astype(np.int32)
    return least


def _joined(one: Drafts, other: Drafts) -> Drafts:
    """Returns both drafts joined; no row has drafts in both."""
    if not one.start[-1] or not other.start[-1]:
        return one if one.start[-1] else other
    tokens = np.insert(one.told, np.repeat(one.start[:-1], other.counts), other.told)
    return Drafts(one.start + other.start, tokens)
