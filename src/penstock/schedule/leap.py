"""Leaper: plans many equal steps at once, for simulators. It does so while no row joins, ends or
waits. The result equals single steps, to the last block number (tests/schedule/test_leap.py), but
costs less.

Used with an engine that launches a step before it reads the one before: step N is launched and not
read. A leap of k steps plans steps N + 1 to N + k and commits steps N to N + k - 1; every row draws
the same token. Knows a scheduler's columns; no device, no clock.
"""

from __future__ import annotations

import numpy as np

from penstock.config import BLOCK_SIZE
from penstock.schedule.rows import EACH_TOKEN, ON_WATCH
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.step import Int32, Moves, StepPlan


class Leaper:
    """Plans many equal steps of one scheduler at once (a leap)."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def steps(self, last: StepPlan) -> int:
        """Returns the number of equal steps that may follow `last`, the step that is launched and
        not read; 0: none. The caller must make sure that no row draws an end-of-sequence or stop
        token in them."""
        scheduler, rows = self.scheduler, self._lasting(last)
        if rows is None:
            return 0
        columns = scheduler.rows
        if columns.traits.take(rows).max() & (EACH_TOKEN | ON_WATCH):
            return 0  # some row must send its tokens after each step
        ahead = int((columns.limit.take(rows) - columns.planned_length.take(rows)).min()) - 2
        # tokens per row for which no block has to be evicted
        room = (scheduler.pool.free // rows.size - 1) * BLOCK_SIZE
        return max(0, min(ahead, room))

    def _lasting(self, last: StepPlan) -> Int32 | None:
        """Returns the running rows if the next step equals the last one and no work waits; else
        None."""
        scheduler = self.scheduler
        order, admission = scheduler.batch_order, scheduler.admission
        waits = admission.ready or admission.prefilling or admission.waiting or admission.behind
        other = (
            last.joins is not None
            or last.chunks is not None
            or last.masks is not None
            or last.drafts is not None
        )
        if (
            waits
            or other
            or scheduler.finisher.waits
            or scheduler.in_flight != 1
            or not order.lasts(last.rows)
        ):
            return None
        busy = (
            scheduler.pool.near
            or scheduler.drafting.may
            or scheduler.limits.preempt_every
            or not last.rows.size
        )
        return None if busy else order.running()

    def leap(self, last: StepPlan, steps: int, token: int) -> StepPlan:
        """Plans so many steps (at most steps()), in which each row draws `token`, and commits all
        but the last. Returns the last plan, which counts as launched and not read."""
        scheduler, rows = self.scheduler, self.scheduler.batch_order.running()
        columns = scheduler.rows
        self._grow(rows, steps)
        reached = columns.read_length.take(rows)
        each: Int32 = np.arange(1, steps + 1, dtype=np.int32)
        slots = columns.slots(np.repeat(rows, steps), np.add.outer(reached, each).reshape(-1))
        scheduler.slot_token.reshape(-1)[slots] = token
        columns.read_length[rows] = reached + np.int32(steps)
        columns.planned_length[rows] += np.int32(steps)
        columns.last_flight[rows] = last.number + steps
        scheduler.skipped(steps, rows.size)
        return StepPlan(
            number=last.number + steps,
            rows=last.rows,
            lengths=columns.planned_length.take(last.rows) - np.int32(1),
            wants=last.wants,
            group_start=last.group_start,
            group_blocks=last.group_blocks,
            group_length=last.group_length,
            moves=Moves.none(),
            new_blocks=last.new_blocks[:0],
            joins=None,
            chunks=None,
            clears=last.clears,
        )

    def _grow(self, rows: Int32, steps: int) -> None:
        """Gives rows the blocks they need, in the order in which single steps would."""
        columns = self.scheduler.rows
        held = columns.blocks.take(rows)
        # number of the step (counted from 1) in which each row needs its next block
        first = np.maximum(1, held * BLOCK_SIZE - columns.planned_length.take(rows))
        counts = np.where(steps >= first, 1 + (steps - first) // BLOCK_SIZE, 0)
        total = int(counts.sum())
        if not total:
            return
        place = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        when = np.repeat(first, counts) + place * BLOCK_SIZE
        owner = np.repeat(rows, counts)
        # the pool hands blocks out from its stack's end, so in an array from the stack the last
        # step's blocks come first
        order = np.lexsort((owner, -when))
        columns.table[owner[order], (np.repeat(held, counts) + place)[order]] = (
            self.scheduler.pool.take(total)
        )
        columns.blocks[rows] = held + counts.astype(np.int32)
