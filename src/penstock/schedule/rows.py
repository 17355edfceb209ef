"""Rows: what the host knows of each live sequence, one array a fact.

A row is a number. It is free, running (in the steps), drained (its last step is launched, not all
read), preempted or ended (out of the steps; flights that name it are still to be read). Its columns
keep their meaning until `free`: that is what lets tokens of late flights reach the right sequence.
It knows no blocks' owners and no requests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.config import BLOCK_SIZE
from penstock.row_table import MAX_STOP_IDS
from penstock.schedule.step import Bool, Int32, Int64

BLOCK_BITS = BLOCK_SIZE.bit_length() - 1
FREE, ENDED, RUNNING, DRAINED, PREEMPTED = range(5)  # what is above ENDED takes tokens

# Bits of a row's traits. Its tokens go up with each step, with each that its watch table names, or
# else at its end.
# more: than the device's
EACH_TOKEN, ON_WATCH, IGNORES_EOS, STOP_IDS, MORE_STOP_IDS = (1 << bit for bit in range(5))

BACKGROUND = 2**40  # added to the `order` of rows in the background: all others are older than they


class Rows:
    """`count` rows with tables of `width` blocks."""

    def __init__(self, count: int, width: int) -> None:
        def ints() -> Int32:
            return np.zeros(count, np.int32)

        self.count = count
        self.width = width
        self.state: NDArray[np.uint8] = np.zeros(count, np.uint8)
        self.group: Int32 = ints()  # slot of its fork group
        self.request: Int64 = np.zeros(count, np.int64)  # id of its request
        self.sample: Int32 = ints()  # index within the request
        # stored tokens once all launched steps have run: read + in flight, at most
        self.planned_length: Int32 = ints()
        # drafts launched and not read: planned_length may be too far by so many
        self.drafted: Int32 = ints()
        # stored tokens as far as was read: the position of the last token known
        self.read_length: Int32 = ints()
        self.prompt: Int32 = ints()  # tokens of the request's prompt
        self.limit: Int32 = ints()  # prompt + max_tokens
        self.sent: Int32 = ints()  # position of the first token that has not gone up
        self.shared: Int32 = ints()  # leading table entries that belong to its group
        self.blocks: Int32 = ints()  # table entries in use
        self.passed: Int32 = ints()  # leading entries that layers with windows need no more
        # of them, those that no tail of its group needs once the prompt is stored
        self.bound: Int32 = ints()
        # of admission: the youngest is preempted first
        self.order: Int64 = np.zeros(count, np.int64)
        self.last_flight: Int64 = np.full(count, -1, np.int64)
        self.traits: NDArray[np.uint8] = np.zeros(count, np.uint8)
        self.watch: Int32 = ints()  # slot of its watch table
        self.wants: NDArray[np.uint8] = np.zeros(count, np.uint8)
        # of its token mask; -1: any token may come
        self.mask_slot: Int32 = np.full(count, -1, np.int32)
        # a constraint says what may come after each token
        self.constrained: Bool = np.zeros(count, np.bool_)
        # logprobs asked for: of so many likely tokens; -1: none
        self.top: Int32 = np.full(count, -1, np.int32)
        self.single: Bool = np.zeros(count, np.bool_)  # its request's only sample
        self.stop_ids: Int32 = np.full((count, MAX_STOP_IDS), -1, np.int32)
        self.table: Int32 = np.zeros((count, width), np.int32)
        self._stack: Int32 = np.arange(count - 1, -1, -1, dtype=np.int32)
        self.free_count = count

    def take(self, count: int) -> Int32:
        """Gives free row numbers, in growing order where they lie so."""
        self.free_count -= count
        return self._stack[self.free_count : self.free_count + count][::-1].copy()

    def free(self, rows: Int32) -> None:
        self.state[rows.astype(np.intp)] = FREE
        self._stack[self.free_count : self.free_count + rows.size] = rows[::-1]
        self.free_count += rows.size

    def slots(self, rows: Int32 | Int64, positions: Int32) -> Int64:
        """Returns indices into the flat slot_token: of positions[i] in the table of rows[i]."""
        place = positions >> BLOCK_BITS
        where = rows.astype(np.int64, copy=False) * self.width
        where += place
        blocks = self.table.reshape(-1).take(where)
        blocks -= place
        slots: Int64 = np.left_shift(blocks, BLOCK_BITS, dtype=np.int64)
        slots += positions
        return slots

    def entries(self, rows: Int32, first: Int32, counts: Int32) -> Int32:
        """Returns the tables' entries first[i] : first[i] + counts[i] of rows[i], row after row."""
        stops = np.cumsum(counts, dtype=np.int64)
        start = rows.astype(np.int64) * self.width + first
        where = np.repeat(start - stops + counts, counts)
        where += np.arange(where.size)
        return self.table.reshape(-1).take(where)

    def own_blocks(self, rows: Int32) -> Int32:
        """Returns the blocks that belong to these rows alone, row after row."""
        shared = self.shared.take(rows)
        return self.entries(rows, shared, self.blocks.take(rows) - shared)

    def check(self) -> None:
        """Restates the invariants; for tests."""
        free = self._stack[: self.free_count]
        assert len(set(free.tolist())) == free.size, "a row is free twice"
        assert (self.state[free] == FREE).all(), "a free row lives"
        assert np.count_nonzero(self.state == FREE) == self.free_count, "a row is lost"
        live = np.flatnonzero(self.state != FREE)
        assert (self.planned_length[live] < self.limit[live]).all(), "a row ran past its limit"
        assert (self.read_length[live] <= self.planned_length[live]).all(), (
            "a row was read past what was launched"
        )
        assert (self.read_length[live] <= self.planned_length[live] - self.drafted[live]).all(), (
            "a draft counts twice"
        )
        running = np.flatnonzero(self.state == RUNNING)
        assert (self.blocks[running] * BLOCK_SIZE >= self.planned_length[running]).all(), (
            "a row outgrew its table"
        )


def counted(slots: Int32) -> tuple[Int32, Int64]:
    """Returns the distinct slots, in growing order, and how often each stands there: as np.unique,
    in a tenth of its time where slots are small numbers, as rows' and groups' are."""
    counts: Int64 = np.bincount(slots)
    values = counts.nonzero()[0]
    return values.astype(np.int32), counts[values]
