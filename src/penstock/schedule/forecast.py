"""Forecast: predicts the blocks that running rows will use. From the prediction for the coming
steps follows how many more rows fit under the capacity.

No blocks are reserved for the worst case. Each row is expected to run as long as finished samples
did (its group's, else the model's); it takes one block every 16 tokens and frees all of its own at
its end. Time is counted in buckets of 16 steps. When the forecast was wrong, a row is preempted and
keeps its tokens.

Knows numbers only: no rows, no pool. `tests/schedule/test_forecast.py` replays it step by step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.config import BLOCK_SIZE
from penstock.schedule.step import Int32, Int64

Float64 = NDArray[np.float64]

_PRIOR = 0.5  # expected length as a fraction of max_tokens until a sample has finished
_FADE = 0.999  # at each finished sample the weight of all earlier ones is multiplied by this
_ROW = 2.0**32  # a sum of _ROW per row plus its pages counts rows and pages at once
# least number of finished samples of a fork group from which its own mean length is used
_ENOUGH = 8


class LengthModel:
    """Estimates output lengths from those of finished samples: a histogram in buckets of 16 tokens,
    in which older samples weigh less."""

    def __init__(self, max_tokens: int) -> None:
        self._counts: Float64 = np.zeros(max_tokens // BLOCK_SIZE + 2)
        self._age: Float64 = np.arange(0.0, self._counts.size * BLOCK_SIZE, BLOCK_SIZE)
        self._residual: Float64 | None = None
        self._mean = 0.0

    def observe(self, lengths: Int32) -> None:
        """Adds the output lengths of samples that have just ended."""
        if not lengths.size:
            return
        self._counts *= _FADE**lengths.size
        buckets = np.minimum(lengths // BLOCK_SIZE, self._counts.size - 1)
        self._counts += np.bincount(buckets, minlength=self._counts.size)
        self._residual = None

    @property
    def mean(self) -> float:
        self._refresh()
        return self._mean

    def remaining(self, age: Int32, limit: Int32, scale: float = 1.0) -> Int32:
        """Returns the expected further tokens, int32 [k], of rows that have made `age` tokens and
        may make at most `limit` more.

        It is the mean of (length - age) over finished samples that were at least as long. scale:
        factor for rows whose fork group's samples are longer or shorter than average (`scale`).
        """
        residual = self._refresh()
        if residual is None:
            guess = np.ceil(limit * _PRIOR).astype(np.int32)
        else:  # round before the look-up: there are fewer buckets than rows
            guess = np.ceil(residual * scale).astype(np.int32).take(age // BLOCK_SIZE, mode="clip")
        tokens: Int32 = np.maximum(np.minimum(guess, limit), 1)
        return tokens

    def remaining_of_one(self, age: int, limit: int, scale: float = 1.0) -> int:
        """Like `remaining`, for one row: arrays would cost ten times as much."""
        residual = self._refresh()
        guess = (
            limit * _PRIOR
            if residual is None
            else residual[min(age // BLOCK_SIZE, residual.size - 1)] * scale
        )
        return max(1, min(math.ceil(guess), limit))

    def scale(self, finished: int, total: int) -> float:
        """Returns a group's mean length relative to the model's; finished: its finished samples,
        total: their output tokens."""
        if finished < _ENOUGH or self.mean <= 0:
            return 1.0
        return float(np.clip(total / finished / self.mean, 0.25, 4.0))

    def _refresh(self) -> Float64 | None:
        if self._residual is None and self._counts.any():
            alive = np.cumsum(self._counts[::-1])[::-1]
            total = np.cumsum((self._counts * (self._age + BLOCK_SIZE / 2))[::-1])[::-1]
            # No finished sample was longer: expect one more bucket.
            mean = np.divide(total, alive, out=self._age + BLOCK_SIZE, where=alive > 1e-9)
            self._residual = np.maximum(mean - self._age, 1.0)
            self._mean = float(mean[0])
        return self._residual


@dataclass(slots=True)
class Forecast:
    """Pages in use at the start of each coming bucket of 16 steps, if every row ends when expected.
    A page is the unit of the block pool; it is a block if no layer has a sliding window."""

    use: Int64  # [buckets] pages in use at the start of each bucket of 16 steps
    fixed: int = 0  # pages of prefixes, which are in use in all buckets
    more: int = 0  # further pages that a block takes until a row's window is full

    @classmethod
    def of(
        cls, own: Int32, remaining: Int32, fixed: int, ramp: Int32 | None = None, more: int = 0
    ) -> Forecast:
        """Returns the forecast of rows with `own` pages now and `remaining` tokens to make, and
        `fixed` pages held by prefixes.

        A row takes one page per bucket, and `more` further pages in each of its first ramp[i]
        buckets, until its window is full.
        """
        if not own.size:
            return cls(np.array([fixed], np.int64), fixed, more)
        ends = (remaining + (BLOCK_SIZE - 1)) // BLOCK_SIZE  # a row runs in buckets 0 to ends
        buckets = int(ends.max()) + 1
        # One float sum counts rows and their pages at once; it is exact, and as fast as a sum of
        # either.
        both = np.bincount(ends, weights=own + _ROW, minlength=buckets)[::-1].cumsum()[::-1]
        alive, held = np.divmod(both, _ROW)
        use = fixed + (held + np.arange(buckets) * alive).astype(np.int64)
        if ramp is not None:
            until = np.minimum(ramp, ends)
            rising = np.cumsum(np.bincount(until, minlength=buckets)[::-1])[::-1]
            risen = np.bincount(ends, weights=until, minlength=buckets) - np.bincount(
                until, until, buckets
            )
            use += more * (
                np.arange(buckets) * rising + np.cumsum(risen[::-1])[::-1].astype(np.int64)
            )
        return cls(use, fixed, more)

    @property
    def peak(self) -> int:
        return int(self.use.max())

    def room(self, capacity: int, own: int, remaining: int, ramp: int = 0) -> int:
        """Returns how many new rows with `own` pages and `remaining` tokens each fit under
        `capacity` in every bucket."""
        buckets = -(-remaining // BLOCK_SIZE) + 1
        need = self._need(own, buckets, ramp)
        self._reach(buckets)
        return max(0, int(((capacity - self.use[:buckets]) // need).min()))

    def _need(self, own: int, buckets: int, ramp: int) -> Int64:
        """Returns the pages that one row holds in each bucket, int64 [buckets]."""
        pages: Int64 = np.arange(own, own + buckets)
        return pages + self.more * np.minimum(np.arange(buckets), ramp) if self.more else pages

    def _reach(self, buckets: int) -> None:
        """Extends `use` to at least `buckets` buckets."""
        if buckets > self.use.size:
            self.use = np.concatenate(
                (self.use, np.full(buckets - self.use.size, self.fixed, np.int64))
            )

    def add(self, count: int, own: int, remaining: int, fixed: int = 0, ramp: int = 0) -> None:
        """Adds `count` new rows, and `fixed` pages of their prefix, to the forecast."""
        buckets = -(-remaining // BLOCK_SIZE) + 1
        self._reach(buckets)
        self.use[:buckets] += count * self._need(own, buckets, ramp)
        self.use += fixed
        self.fixed += fixed
