"""Preemption: takes blocks from rows for other rows. The scheduler preempts a row, or a fork group
that waits for rows, when blocks are short; it is queued again with all its tokens.

    running --blocks short, or others starve--> preempted --steps read--> back in the queue, as a
    group of one sample
    prefilled, no rows --blocks short--> waiting again, its blocks released

Knows rows, groups, blocks and the queue; not how tokens are read, nor what ends a sample.
"""

from __future__ import annotations

import numpy as np

from penstock.schedule.admission import Admission
from penstock.schedule.batch_order import BatchOrder
from penstock.schedule.blocks import BlockPool
from penstock.schedule.deferred_free import DeferredFree
from penstock.schedule.logprob_store import NO_SCORES
from penstock.schedule.output_processor import OutputProcessor
from penstock.schedule.request_state import ForkGroup, Groups
from penstock.schedule.rows import BACKGROUND, ENDED, PREEMPTED, Rows
from penstock.schedule.step import Int32


class Preempter:
    """Chooses rows and groups to preempt, and brings preempted rows back."""

    def __init__(
        self,
        rows: Rows,
        pool: BlockPool,
        groups: Groups,
        admission: Admission,
        batch_order: BatchOrder,
        outputs: OutputProcessor,
        deferred: DeferredFree,
    ) -> None:
        self.rows, self.pool, self.groups, self.admission = rows, pool, groups, admission
        self.batch_order, self.outputs, self.deferred = batch_order, outputs, deferred
        self.preemptions = 0

    def preempt(self, blocks: int) -> None:
        """Preempts the youngest rows until `blocks` blocks will be free; the oldest row always
        stays."""
        running = self.batch_order.running()
        if running.size < 2:
            return
        youngest = self._youngest(running)[:-1]
        freed = np.cumsum(self.rows.blocks[youngest] - self.rows.shared[youngest])
        self._preempt(youngest[: int(np.searchsorted(freed, blocks)) + 1])

    def preempt_background(self) -> None:
        """Preempts background rows, youngest first, one for each foreground sample that got no row.
        Rows that are already preempted and not free yet count."""
        running = self.batch_order.running()
        background = running[self.rows.order[running] >= BACKGROUND]
        count = self.admission.count_starved(self.rows.count)
        count -= int(np.count_nonzero((self.rows.state == PREEMPTED) | (self.rows.state == ENDED)))
        if count > 0 and background.size:
            self._preempt(self._youngest(background)[:count])

    def reclaim(self, short: int) -> None:
        """Makes `short` blocks free, once the steps in flight are read: takes them first from
        groups without rows, the youngest first, then from rows."""
        coming = self.deferred.blocks_coming()
        idle = [
            g
            for g in (*self.admission.ready, *self.admission.prefilling)
            if not g.rows and g.blocks.size
        ]
        while idle and coming < short:
            coming += self._requeue(idle.pop())
        if coming < short:
            self.preempt(short - coming)

    def unblock(self) -> None:
        """Breaks a deadlock: with no running rows and no steps in flight, all prefilled groups but
        the first release their blocks."""
        for group in [*self.admission.ready, *self.admission.prefilling][1:]:
            if not group.rows:
                self._requeue(group)

    def preempt_all(self) -> None:
        """Preempts all running rows, the oldest too."""
        self._preempt(self.batch_order.running())

    def unplace(self) -> None:
        """Sends all groups without rows, prefilled or prefilling, back to the waiting queue, and
        releases their blocks."""
        for group in [*self.admission.ready, *self.admission.prefilling]:
            if not group.rows:
                self._requeue(group)

    def resume(self, rows: Int32) -> None:
        """Sends preempted rows, whose steps have all been read, back to the queue as groups of one
        sample with all its tokens."""
        for row in rows.tolist():
            columns, group = self.rows, self.groups[int(self.rows.group[row])]
            tokens = np.concatenate(
                (group.tokens[: group.live.prompt_length], self.outputs.tokens_of(row))
            )
            resumed = self.groups.add(
                group.live, tokens, columns.sample[row : row + 1].copy(), int(columns.sent[row])
            )
            right, wrong = columns.guesses[:, row].tolist()
            resumed.guesses = right, wrong
            if columns.top[row] != NO_SCORES and columns.sent[row] <= columns.read_length[row]:
                resumed.scored = self.outputs.scores_of(row)
            self.admission.push(resumed)

    def _youngest(self, rows: Int32) -> Int32:
        """Returns `rows`, the last admitted first, int32 [k]."""
        youngest: Int32 = rows[np.argsort(-self.rows.order[rows], kind="stable")]
        return youngest

    def _preempt(self, rows: Int32) -> None:
        self.preemptions += rows.size
        self.deferred.leave(rows, PREEMPTED)

    def _requeue(self, group: ForkGroup) -> int:
        """Sends a group without rows back to the waiting queue; returns the number of blocks this
        frees."""
        blocks = self.admission.requeue(group)
        self.deferred.add_blocks(blocks, group.last_flight)
        return int(np.count_nonzero(self.pool.refs[blocks] == 1))
