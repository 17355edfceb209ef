"""SamplingMirror: the host's copy of rows' sampling options. With it the host needs no read from
the device.

Knows row numbers and the columns of their joins; updated in launch order by the thread that
launches steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.step import Float32, Int32, Int64, Joins


class SamplingMirror:
    """Arrays indexed by row number. The rows' logit_bias values are in a pool, one row after the
    other; when the pool is full, those of live rows are moved together."""

    def __init__(self, max_rows: int) -> None:
        rows = max_rows + 1
        self.wants: NDArray[np.uint8] = np.zeros(rows, np.uint8)
        self.logprobs: Int32 = np.full(rows, -1, np.int32)
        self.moved = False  # True if the last join moved other rows' biases
        self.bias_first: Int64 = np.zeros(rows, np.int64)
        self._bias_count: Int64 = np.zeros(rows, np.int64)
        self.bias_ids: Int32 = np.zeros(0, np.int32)
        self.bias_values: Float32 = np.zeros(0, np.float32)
        self.bias_end = 0

    def join(self, joins: Joins) -> slice:
        """Stores the options of joining rows. Returns the changed part of the bias pool; sets
        `moved` if other rows' biases have moved too."""
        rows, records, before = joins.rows, joins.records, self.bias_end
        self.moved = False
        self.wants[rows] = records["wants"]
        self.logprobs[rows] = records["logprobs"]
        self._bias_count[rows] = 0  # forget the biases of the row that had this number before
        if joins.bias_ids.size:
            self._keep_bias(rows, joins.bias_start, joins.bias_ids, joins.bias_values)
        return slice(0 if self.moved else before, self.bias_end)

    def _places(self, rows: Int32 | Int64) -> Int64:
        """Returns the positions of the rows' biases in the pool, row by row."""
        count = self._bias_count[rows]
        before = np.cumsum(count) - count
        return np.repeat(self.bias_first[rows] - before, count) + np.arange(int(count.sum()))

    def _keep_bias(self, rows: Int32, start: Int32, ids: Int32, values: Float32) -> None:
        if self.bias_end + ids.size > self.bias_ids.size:
            self._pack(ids.size)
        first, last = self.bias_end, self.bias_end + ids.size
        self.bias_ids[first:last] = ids
        self.bias_values[first:last] = values
        self.bias_first[rows] = first + start[:-1]
        self._bias_count[rows] = np.diff(start)
        self.bias_end = last

    def _pack(self, wanted: int) -> None:
        """Moves live rows' biases to the front of a new pool, at most half full afterwards."""
        owners = np.flatnonzero(self._bias_count)
        places = self._places(owners)
        size = 2 * (places.size + wanted)
        for name, kept in (
            ("bias_ids", self.bias_ids[places]),
            ("bias_values", self.bias_values[places]),
        ):
            pool = np.zeros(size, kept.dtype)
            pool[: kept.size] = kept
            setattr(self, name, pool)
        self.bias_first[owners] = np.cumsum(self._bias_count[owners]) - self._bias_count[owners]
        self.bias_end = places.size
        self.moved = True
