"""DraftGate: decides, step by step and row by row, how many tokens the device drafts.

A draft costs a query, whether it turns out right or not. So the gate compares, for each number of
queries, the tokens that the step is expected to give with the seconds that it takes, and drafts
only where that gives more tokens per second. It knows the seconds of steps as measured
(engine/pace.py), and the share of each row's newest drafts that were right. Of some ten drafts that
share is mostly luck, and the rows with the best luck would take the drafts of all others. So it is
drawn towards the mean of the step's rows, the more the less they differ beyond luck. A row whose
drafts keep being wrong pauses, longer each time. Knows rows and numbers; no tokens.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.rows import Rows
from penstock.schedule.step import Bool, Drafts, Int32, Int64

Float64 = NDArray[np.float64]

MOST_ROWS = 256  # rows above which a step's time is never mostly reading weights
FIRST_SHARE = 0.5  # share of right drafts assumed of a row that has not drafted yet
FIRST_WEIGHT = 2.0  # drafts of its own that weigh as much
# Where a step with few drafts takes so many times as long as one without, a row is assumed to be
# like those that drafted lately. Their counts fade by a factor at each step; as many drafts
# weigh as much as FIRST_SHARE.
DEAR, FADE_OF_ALL, WEIGHT_OF_ALL = 1.2, 0.995, 8.0
# a row pauses after so many steps with wrong drafts alone, at a share below this
MOST_WRONG, LEAST_SHARE = 4, 0.25
# factor by which a row's counts fade at each step, so that a row that had bad luck tries again
FADE = 0.9
ENOUGH = 3.0  # drafts of its own from which on a row counts in the mean
# most drafts of a row that weigh as much as the mean
MOST_WEIGHT = 64.0
FIRST_PAUSE, LONGEST_PAUSE = 16, 1024  # steps that a row pauses
# least expected gain in tokens per second, as a factor: measured seconds are uncertain
LEAST_GAIN = 1.03
# most steps after one in which drafts didn't pay, before the rows are looked at again: what the
# gate computes in a step takes a tenth of a millisecond
LONGEST_REST = 16
# Where a step with few drafts takes so many times as long, a rest is up to LONGEST_PAUSE steps,
# until drafts have paid for LONGEST_REST steps in a row.
DEAREST = 1.5
HOLD = 2  # steps that draft as was chosen for the first of them, unless rows have joined


class QuerySeconds(Protocol):
    """Measured seconds of steps."""

    def alone(self, rows: int) -> float:
        """Returns the seconds of a step of so many rows without drafts; 0: unknown."""

    def least_drafting(self, rows: int) -> float:
        """Returns the seconds of a step of so many rows with the fewest drafts that were measured,
        if they are few; 0: no such step was measured."""

    def with_drafts(self, rows: int, queries: Int64) -> Float64:
        """Returns the seconds of a step of so many rows for each number of queries [n] above it."""

    def sizes(self, least: int, most: int) -> Int64:
        """Returns the numbers of queries between `least` and `most` where seconds rise."""


class DraftGate:
    """A Drafter. columns: the scheduler's rows. most: most drafts of a row. seconds: durations of
    steps. stores: most tokens of a row that the device stores while it makes drafts."""

    def __init__(self, columns: Rows, most: int, seconds: QuerySeconds, stores: int = 0) -> None:
        self.proposes, self.follows, self.reach = 0, False, most + stores
        self._columns, self.most, self._seconds = columns, most, seconds
        self._stores = stores > 0
        self._order = np.full(columns.count, -1, np.int64)  # admission that a row's numbers are of
        # newest drafts of each row: those that were right, and those that were tried. A draft
        # behind a wrong one is not tried
        self._right, self._tried = np.zeros((2, columns.count))
        # the same of all rows
        self._all_right = self._all_tried = 0.0
        # steps with wrong drafts alone since the last right one; length and rest of the row's pause
        self._wrong, self._pause, self._left = np.zeros((3, columns.count), np.int32)
        # drafts that the device made after the row's last step
        self._drafted = np.zeros(columns.count, np.int32)
        # steps of the rest that remain, of the next rest, and since the last offer; rows at its
        # beginning
        self._rest, self._next_rest, self._rested, self._rows = 0, 1, 0, 0
        # True if drafting is DEAREST; steps in a row in which it has paid
        self._dearest, self._paid = False, 0
        # drafts chosen for each row, and steps for which they hold
        self._wanted, self._held = np.zeros(columns.count, np.int32), 0

    def wants(self, rows: Int32) -> bool:
        """Returns False for a step of these rows if none should draft; `offer` is not called for it
        then."""
        if rows.size > MOST_ROWS:
            self.proposes, self.follows = 0, False
            self._drafted[:], self._held = 0, 0
            return False
        # of half the rows other drafts may pay; a layer must follow rows that join
        if not self._rest or 2 * rows.size <= self._rows:
            return True
        if self._stores and self._new(rows).size:
            return True
        self._rest -= 1
        self._rested += 1
        return False

    def offer(self, rows: Int32, lengths: Int32, most: Int32) -> Drafts:
        """Returns the number of drafts of each row in this step, and sets `proposes` and `follows`
        for what the device does after it."""
        alike = self._rows // 2 < rows.size <= self._rows
        if self._held and alike and not self._new(rows).size:
            self._held -= 1
            self._rested += 1
        else:
            self._choose(rows)
        wanted, drafted = self._wanted.take(rows), self._drafted.take(rows)
        self.proposes = int(wanted.max(initial=0))
        counts = np.minimum(np.minimum(wanted, most), drafted)
        self._drafted[rows] = self.proposes
        start = np.zeros(rows.size + 1, np.int32)
        np.cumsum(counts, out=start[1:])
        return Drafts(start, None)

    def _choose(self, rows: Int32) -> None:
        """Chooses the rows' drafts for this step and the next ones, or that no row drafts."""
        self._meet(rows)
        passed, self._rested = 1 + self._rested, 0
        self._right[rows] *= FADE**passed
        self._tried[rows] *= FADE**passed
        self._all_right *= FADE_OF_ALL**passed
        self._all_tried *= FADE_OF_ALL**passed
        asleep: Bool = self._left[rows] > 0
        self._left[rows] -= np.minimum(self._left[rows], passed)
        # rows with a constraint get the tokens that their grammar forces
        awake = ~asleep & ~self._columns.constrained.take(rows)
        wanted = self._chosen(rows, np.where(awake, self.most, 0))
        drafts, self.follows = bool(wanted.any()), bool(awake.any())
        self._wanted[rows], self._held = wanted, HOLD - 1 if drafts else 0
        self._rest, self._rows = 0, rows.size
        if drafts:
            self._paid += min(passed, HOLD)  # not the rest before
            if not self._dearest or self._paid > LONGEST_REST:
                self._next_rest = 1
            return
        longest, factor = (LONGEST_PAUSE, 4) if self._dearest else (LONGEST_REST, 2)
        self._next_rest, self._paid = min(factor * self._next_rest, longest), 0
        # no longer than until a row's pause is over
        soon = longest if self._dearest else int(self._left[rows[asleep]].min(initial=longest))
        self._rest = min(self._next_rest, soon)
        self._drafted[:] = 0
        if self._rest > LONGEST_REST:
            self._rows //= 4  # the rest lasts until an eighth of the rows are left

    @property
    def idle(self) -> bool:
        """Returns True in a rest where drafting is DEAREST: few drafts are made after it."""
        return self._dearest and self._rest > 0

    def settled(self, rows: Int32, offered: Int32, right: Int32) -> None:
        """Takes in a step that was read: each row's drafts, and how many of them were right."""
        at = offered > 0
        rows, offered, right = rows[at], offered[at], right[at]
        tried = right + (right < offered)
        self._right[rows] += right
        self._tried[rows] += tried
        self._all_right += float(right.sum())
        self._all_tried += float(tried.sum())
        self._wrong[rows] = wrong = np.where(right > 0, 0, self._wrong[rows] + 1)
        # steps launched before a pause are read in it
        tired = (wrong >= MOST_WRONG) & (self._left[rows] == 0)
        if tired.any():
            tired &= self._shares(rows) < LEAST_SHARE
        pause = self._pause[rows]
        self._left[rows[tired]], self._wanted[rows[tired]] = pause[tired], 0
        self._wrong[rows[tired]] = MOST_WRONG // 2  # the row tries fewer times after its pause
        longer = np.minimum(2 * pause, LONGEST_PAUSE)
        self._pause[rows] = np.where(right > 0, FIRST_PAUSE, np.where(tired, longer, pause))

    def _shares(self, rows: Int32, first: float = FIRST_SHARE) -> Float64:
        """Returns the expected share of right drafts of each row. first: of one without drafts.

        A row with few drafts is taken by itself. The others are drawn towards their mean as if
        their shares followed a beta distribution, whose width is that of the found shares less what
        chance alone makes of it (method of moments)."""
        right, tried = self._right[rows], self._tried[rows]
        assumed = np.where(tried > 0, FIRST_SHARE, first)
        shares: Float64 = (right + FIRST_WEIGHT * assumed) / (tried + FIRST_WEIGHT)
        known = tried >= ENOUGH
        if (count := int(np.count_nonzero(known))) > 1:
            right, tried = right[known], tried[known]
            total = tried.sum()
            mean = right.sum() / total
            by_chance = mean * (1 - mean)
            spread = (tried * (right / tried - mean) ** 2).sum() / total
            beyond = spread - by_chance * (count - 1) / total
            weight = by_chance / beyond if beyond * MOST_WEIGHT > by_chance else MOST_WEIGHT
            shares[known] = (right + weight * mean) / (tried + weight)
        return shares

    def _new(self, rows: Int32) -> Int32:
        """Returns the rows that have another sample than when drafts were chosen."""
        new: Int32 = rows[self._order.take(rows) != self._columns.order.take(rows)]
        return new

    def _meet(self, rows: Int32) -> None:
        """Sets the numbers of rows that another sample has now."""
        new = self._new(rows)
        self._order[new] = self._columns.order[new]
        self._right[new], self._tried[new] = 0.0, 0.0
        self._wrong[new], self._pause[new], self._left[new] = 0, FIRST_PAUSE, 0
        self._drafted[new] = 0

    def _chosen(self, rows: Int32, most: Int32) -> Int32:
        """Returns the drafts of each row with which the step is expected to give the most tokens
        per second; most [rows]: at most so many."""
        counts, self._dearest = np.zeros(rows.size, np.int32), False
        if not most.any():
            return counts
        alone = self._seconds.alone(rows.size)
        if not alone:
            return counts
        sizes = self._seconds.sizes(rows.size + 1, rows.size + int(most.sum()))
        seconds = np.maximum(self._seconds.with_drafts(rows.size, sizes), alone)
        least = LEAST_GAIN * rows.size / alone
        few = max(float(seconds[0]), self._seconds.least_drafting(rows.size))
        first, self._dearest = FIRST_SHARE, few > DEAREST * alone
        if few > DEAR * alone:
            first = self._all_right + WEIGHT_OF_ALL * FIRST_SHARE
            first /= self._all_tried + WEIGHT_OF_ALL
        share = self._shares(rows, first)
        if not ((rows.size + (sizes - rows.size) * share[most > 0].max()) / seconds > least).any():
            return counts  # not even if all drafts were as good as the best row's first
        # the n-th draft of a row counts only if all before it are right
        ahead = np.arange(1, self.most + 1)
        gain = np.where(ahead <= most[:, None], share[:, None] ** ahead, 0.0)
        best = np.argsort(-gain, axis=None, kind="stable")
        tokens = rows.size + np.cumsum(gain.reshape(-1)[best])
        rate = tokens[sizes - rows.size - 1] / seconds
        top = int(rate.argmax())
        if rate[top] > least:
            drafts = best[: sizes[top] - rows.size] // self.most
            counts += np.bincount(drafts, minlength=rows.size).astype(np.int32)
        return counts
