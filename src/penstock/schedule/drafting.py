"""Drafting: draft tokens for the rows of a step. A draft is a drafter's guess, or a token that a
grammar forces.

Knows rows, drafters, and free room; not whether drafts turn out right.
"""

from __future__ import annotations

import numpy as np

from penstock.config import BLOCK_SIZE
from penstock.errors import UsageError
from penstock.row_table import MAX_DRAFTS
from penstock.schedule.mask_slots import MaskSlots
from penstock.schedule.rows import Rows
from penstock.schedule.step import Bool, Drafter, Drafts, Int32

# a step gets one forced token per so many rows without a constraint, so that forced tokens delay
# these rows only a little
_COMPANY = 48


class Drafting:
    """Makes drafts for one scheduler's rows. drafter: guesses tokens; None: the only drafts are
    forced tokens. states: True if rows have recurrent state, which cannot be rolled back after a
    wrong draft; then there are no drafts, and giving a drafter raises UsageError."""

    def __init__(
        self, rows: Rows, mask_slots: MaskSlots, drafter: Drafter | None, states: bool = False
    ) -> None:
        if states and drafter is not None:
            raise UsageError(
                "drafts are for models whose layers all attend: this one has recurrent state"
            )
        self.rows, self.mask_slots, self.drafter, self._states = rows, mask_slots, drafter, states

    @property
    def may(self) -> bool:
        """Returns True if any row may have drafts in flight."""
        return not self._states and (self.drafter is not None or self.mask_slots.guides_any)

    def offer(self, rows: Int32, lengths: Int32) -> Drafts | None:
        """Returns the drafts for the rows of a step; adds them to the rows' planned lengths, as if
        all were right.

        A row gets no more drafts than its last block has room for, so drafts never take a block;
        the step gets no more queries than the batch has rows, so no larger step size is needed.
        """
        if not rows.size or not self.may:
            return None
        columns = self.rows
        ends = np.minimum(columns.limit.take(rows), columns.blocks.take(rows) * BLOCK_SIZE)
        most = np.clip(ends - lengths - 2, 0, MAX_DRAFTS).astype(np.int32)
        guided = columns.constrained.take(rows)
        room = columns.count - rows.size
        free = rows.size - int(np.count_nonzero(guided))
        forced = min(room, max(MAX_DRAFTS, free // _COMPANY)) if free else room
        drafts = self.mask_slots.forced(rows, _within(np.where(guided, most, 0), forced))
        if self.drafter is not None:
            most = _within(np.where(guided, 0, most), room - int(drafts.start[-1]))
            drafts = _joined(drafts, self.drafter.offer(rows, lengths, most))
        if not drafts.start[-1]:
            return None
        columns.planned_length[rows] += drafts.counts
        columns.drafted[rows] += drafts.counts
        return drafts

    def without_full(self, rows: Int32) -> Int32:
        """Returns the rows [k] without those that reach their limit if all their drafts in flight
        are right."""
        if not self.may:
            return rows
        full: Bool = self.rows.planned_length.take(rows) + 1 >= self.rows.limit.take(rows)
        return rows[~full] if full.any() else rows


def _within(most: Int32, room: int) -> Int32:
    """Returns a count per row: most[i], cut so that the total is at most `room`; earlier rows are
    served first."""
    least: Int32 = np.minimum(most, np.maximum(room - (np.cumsum(most) - most), 0)).astype(np.int32)
    return least


def _joined(one: Drafts, other: Drafts) -> Drafts:
    """Returns both drafts joined; no row has drafts in both."""
    if not one.start[-1] or not other.start[-1]:
        return one if one.start[-1] else other
    tokens = np.insert(one.told, np.repeat(one.start[:-1], other.counts), other.told)
    return Drafts(one.start + other.start, tokens)
