"""Rows: the host's data of each running sample. There is one array per field.

A row is one sample's place in the batch, named by a number. It is free, running (in the steps),
drained (its last step is launched, not all are read), preempted or ended (out of the steps; steps
in flight that name it are still to be read). Its columns stay valid until `free`, so tokens of late
steps reach the right sample. Knows no blocks' owners and no requests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.config import BLOCK_SIZE
from penstock.row_table import MAX_STOP_IDS
from penstock.schedule.step import Bool, Int32, Int64

BLOCK_BITS = BLOCK_SIZE.bit_length() - 1
FREE, ENDED, RUNNING, DRAINED, PREEMPTED = range(5)  # rows in a state above ENDED still get tokens

# Bits of a row's traits. EACH_TOKEN: tokens are sent after each step. ON_WATCH: they are sent when
# one may end a stop string (stop_token_masks.py). Neither: all are sent at the end. MORE_STOP_IDS:
# the row has more stop ids than the device checks.
EACH_TOKEN, ON_WATCH, IGNORES_EOS, STOP_IDS, MORE_STOP_IDS = (1 << bit for bit in range(5))

# added to the `order` of background rows, so that they count as younger than all others
BACKGROUND = 2**40


class Rows:
    """Data of `count` rows, one array per field, with block tables of `width` blocks."""

    def __init__(self, count: int, width: int) -> None:
        def ints() -> Int32:
            return np.zeros(count, np.int32)

        self.count = count
        self.width = width
        self.state: NDArray[np.uint8] = np.zeros(count, np.uint8)
        self.group: Int32 = ints()  # slot of the row's fork group
        self.request: Int64 = np.zeros(count, np.int64)  # id of the row's request
        self.sample: Int32 = ints()  # index of the row's sample within its request
        # tokens in the KV cache once all launched steps have run; with drafts an upper bound
        self.planned_length: Int32 = ints()
        # drafts in flight: planned_length may be too high by so many
        self.drafted: Int32 = ints()
        # tokens in the KV cache after the steps read; also the position of the last known token
        self.read_length: Int32 = ints()
        self.prompt: Int32 = ints()  # number of prompt tokens of the row's request
        self.limit: Int32 = ints()  # most tokens of the sample: prompt + max_tokens
        self.sent: Int32 = ints()  # position of the first token not sent yet
        # drafts since the first token not sent yet that were right, and that were wrong
        self.guesses: Int32 = np.zeros((2, count), np.int32)
        # number of leading blocks in its table that its fork group owns
        self.shared: Int32 = ints()
        self.blocks: Int32 = ints()  # number of blocks in the row's block table
        # number of leading blocks in its table that its sliding windows no longer reach
        self.passed: Int32 = ints()
        # number of leading blocks in its table that no sample of its fork group needs for sliding
        # windows once the prompt is stored
        self.bound: Int32 = ints()
        # number that rises with each admission; rows with the highest are preempted first
        self.order: Int64 = np.zeros(count, np.int64)
        self.last_flight: Int64 = np.full(count, -1, np.int64)
        self.traits: NDArray[np.uint8] = np.zeros(count, np.uint8)
        self.watch: Int32 = ints()  # slot of the row's table in StopTokenMasks
        self.wants: NDArray[np.uint8] = np.zeros(count, np.uint8)
        # slot of its token mask; -1: any token is allowed
        self.mask_slot: Int32 = np.full(count, -1, np.int32)
        # True if the row has a constraint (structured output)
        self.constrained: Bool = np.zeros(count, np.bool_)
        # number of most likely tokens with logprobs; -1: no logprobs
        self.top: Int32 = np.full(count, -1, np.int32)
        # True if the row has its request's only sample
        self.single: Bool = np.zeros(count, np.bool_)
        self.stop_ids: Int32 = np.full((count, MAX_STOP_IDS), -1, np.int32)
        self.table: Int32 = np.zeros((count, width), np.int32)
        self._stack: Int32 = np.arange(count - 1, -1, -1, dtype=np.int32)
        self.free_count = count

    def take(self, count: int) -> Int32:
        """Returns `count` free row numbers; adjacent ones in ascending order."""
        self.free_count -= count
        return self._stack[self.free_count : self.free_count + count][::-1].copy()

    def free(self, rows: Int32) -> None:
        self.state[rows.astype(np.intp)] = FREE
        self._stack[self.free_count : self.free_count + rows.size] = rows[::-1]
        self.free_count += rows.size

    def slots(self, rows: Int32 | Int64, positions: Int32) -> Int64:
        """Returns the KV cache slot (flat index into slot_token) of position positions[i] of
        rows[i]."""
        place = positions >> BLOCK_BITS
        where = rows.astype(np.int64, copy=False) * self.width
        where += place
        blocks = self.table.reshape(-1).take(where)
        blocks -= place
        slots: Int64 = np.left_shift(blocks, BLOCK_BITS, dtype=np.int64)
        slots += positions
        return slots

    def entries(self, rows: Int32, first: Int32, counts: Int32) -> Int32:
        """Returns the blocks (block table entries) first[i] : first[i] + counts[i] of rows[i], one
        row after the other."""
        stops = np.cumsum(counts, dtype=np.int64)
        start = rows.astype(np.int64) * self.width + first
        where = np.repeat(start - stops + counts, counts)
        where += np.arange(where.size)
        return self.table.reshape(-1).take(where)

    def own_blocks(self, rows: Int32) -> Int32:
        """Returns the blocks that these rows own alone, one row after the other."""
        shared = self.shared.take(rows)
        return self.entries(rows, shared, self.blocks.take(rows) - shared)

    def check(self) -> None:
        """Checks the row table's invariants; for tests."""
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
    """Returns the distinct slots in ascending order and their counts, like np.unique, in a tenth of
    its time for small numbers such as rows and groups."""
    counts: Int64 = np.bincount(slots)
    values = counts.nonzero()[0]
    return values.astype(np.int32), counts[values]
