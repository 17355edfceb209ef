"""Departure: who goes out. Rows end, are cancelled or preempted; what they held comes back once no flight names it.

    running --token, limit, cancel--> ended     --flights read--> free, blocks back (n = 1: its full blocks kept)
            --blocks short----------> preempted --flights read--> back into the line with all it has made

It knows rows, groups, blocks and the line; not how tokens are read, nor how a step is ordered.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from penstock.schedule.admission import Admission
from penstock.schedule.batch_order import BatchOrder
from penstock.schedule.blocks import BlockPool
from penstock.schedule.deferred_free import DeferredFree
from penstock.schedule.forecast import LengthModel
from penstock.schedule.logprob_store import NO_SCORES
from penstock.schedule.output_processor import OutputProcessor
from penstock.schedule.prefix_tree import PrefixTree
from penstock.schedule.request_state import ForkGroup, Groups, RequestState
from penstock.schedule.rows import BACKGROUND, ENDED, PREEMPTED, RUNNING, Rows
from penstock.schedule.step import Int32

_TREE_BUDGET = 512  # generated blocks that go into the tree a step


class Departure:
    """The way out."""

    def __init__(
        self,
        rows: Rows,
        pool: BlockPool,
        tree: PrefixTree,
        groups: Groups,
        admission: Admission,
        batch_order: BatchOrder,
        lengths: LengthModel,
        outputs: OutputProcessor,
    ) -> None:
        self.rows, self.pool, self.tree, self.groups = rows, pool, tree, groups
        self.admission, self.batch_order, self.lengths, self.outputs = admission, batch_order, lengths, outputs
        self.deferred = DeferredFree()
        self.preemptions = 0
        self._distrusted: set[int] = set()  # rows, until they are free
        self._to_keep: list[int] = []  # rows whose generated blocks the tree will take before they go

    @property
    def waits(self) -> bool:
        return not self.deferred.empty or bool(self._to_keep)

    def ended(self, rows: Int32) -> list[RequestState]:
        """Rows whose last token was read; gives the requests that lost samples."""
        if not rows.size:
            return []
        self._observe(rows)
        lives = []
        slots, counts = _counted(self.rows.group[rows])
        for group, count in zip(self.groups.at(slots), counts, strict=True):
            live = group.live
            live.outstanding -= count
            lives.append(live)
        self._leave(rows, ENDED)
        return lives

    def invalidate(self, rows: Int32) -> None:
        """Rows whose logits were not finite: no block of theirs, prompt's or own, is found again by anybody.

        A prompt's are in the tree from the moment they are planned, so whoever comes later computes them anew. Others
        that share them by now keep them: what is wrong with them they tell by their own logits.
        """
        if not rows.size or not self.tree.enabled:
            return
        self._distrusted |= set(rows.tolist())
        tables = [self.rows.table[row, : self.rows.blocks[row]] for row in rows.tolist()]
        self.tree.drop(np.unique(np.concatenate(tables)))

    def _observe(self, rows: Int32) -> None:
        """Lets the forecast learn from samples that came to their end; a group's own mean counts if it has several."""
        outputs = self.rows.read[rows] - self.rows.prompt[rows] + 1
        self.lengths.observe(outputs)
        several = ~self.rows.single[rows]
        slots, place, counts = np.unique(self.rows.group[rows[several]], return_inverse=True, return_counts=True)
        totals = np.bincount(place, weights=outputs[several], minlength=slots.size)
        for slot, count, total in zip(slots.tolist(), counts.tolist(), totals.tolist(), strict=True):
            group = self.groups[slot]
            group.finished += count
            group.finished_tokens += int(total)

    def cancel(self, live: RequestState, sample: int | None) -> None:
        """Ends all of a request, or one sample: pending tails at once, rows as their flights are read."""
        for group in list(live.groups):
            pending = group.samples[group.next :]
            stay = pending[:0] if sample is None else pending[pending != sample]
            if stay.size < pending.size:
                live.outstanding -= pending.size - stay.size
                group.drop_pending(stay)
                if not stay.size:
                    self.admission.remove(group)
                    self._close_if_over(group)
        rows = live.row_of if sample is None else live.row_of[sample : sample + 1]
        rows = rows[rows >= 0]
        rows = rows[self.rows.state[rows] != ENDED]
        live.outstanding -= rows.size
        if sample is not None:  # it came to its end (a stop string): the whole request's going away teaches nothing
            self._observe(rows)
        self._leave(rows, ENDED)

    def preempt(self, blocks: int) -> None:
        """Takes the youngest rows out until `blocks` will come free; the oldest row always stays."""
        running = self.batch_order.running()
        if running.size < 2:
            return
        youngest = running[np.argsort(-self.rows.order[running], kind="stable")][:-1]
        freed = np.cumsum(self.rows.blocks[youngest] - self.rows.shared[youngest])
        victims = youngest[: int(np.searchsorted(freed, blocks)) + 1]
        self.preemptions += victims.size
        self._leave(victims, PREEMPTED)

    def preempt_background(self) -> None:
        """Takes rows in the background out, the youngest first, for tails that find no place; rows that are on their
        way out count already."""
        running = self.batch_order.running()
        behind = running[self.rows.order[running] >= BACKGROUND]
        count = self.admission.count_starved(self.rows.count)
        count -= int(np.count_nonzero((self.rows.state == PREEMPTED) | (self.rows.state == ENDED)))
        if count <= 0 or not behind.size:
            return
        victims = behind[np.argsort(-self.rows.order[behind], kind="stable")][:count]
        self.preemptions += victims.size
        self._leave(victims, PREEMPTED)

    def reclaim(self, short: int, read: int) -> None:
        """Sees to it that `short` blocks come free: groups without rows first, the youngest first, then rows."""
        coming = self.deferred.blocks_coming(self.rows)
        idle = [g for g in (*self.admission.ready, *self.admission.prefilling) if not g.rows and g.blocks.size]
        while idle and coming < short:
            coming += self._park(idle.pop())
        if coming < short:
            self.preempt(short - coming)
        self.drain(read)

    def unblock(self, read: int) -> None:
        """Nothing runs and nothing flies: whatever stands in the way of the first in the line gives its blocks back."""
        for group in [*self.admission.ready, *self.admission.prefilling][1:]:
            if not group.rows:
                self._park(group)
        self.drain(read)

    def still_running(self, rows: Int32) -> Int32:
        running: Int32 = rows[self.rows.state[rows] == RUNNING]
        return running

    def drain(self, read: int) -> None:
        """Frees what no flight after `read` names."""
        rows, blocks = self.deferred.take(read)
        if blocks:
            self.pool.release(np.concatenate(blocks))
        if rows.size:
            preempted = rows[self.rows.state[rows] == PREEMPTED]
            for row in preempted.tolist():
                self._resume(row)
            self._free(self._kept_back(rows) if self.tree.enabled else rows)
        if self._to_keep:
            self._keep_some()

    # --- one row's or one group's end ---------------------------------------------------------------------------------

    def _leave(self, rows: Int32, state: int) -> None:
        """Rows leave the steps; those that had left already (preempted, and now ended) only change their state."""
        fresh = rows[(self.rows.state[rows] != PREEMPTED) & (self.rows.state[rows] != ENDED)]
        self.rows.state[rows] = state
        if not fresh.size:
            return
        slots, counts = np.unique(self.rows.group[fresh], return_counts=True)
        for group, count in zip(self.groups.at(slots.tolist()), counts.tolist(), strict=True):
            group.running -= count
        self.batch_order.removed(slots, counts)
        self.deferred.add_rows(fresh, self.rows)

    def _free(self, rows: Int32) -> None:
        if not rows.size:
            return
        self.pool.release(self.rows.own_blocks(rows))
        slots = self.rows.group[rows]
        by_group = np.argsort(slots, kind="stable")
        sorted_rows = rows[by_group]
        samples = self.rows.sample[sorted_rows]
        at = 0
        for slot, count in zip(*_counted(slots), strict=True):
            group = self.groups[slot]
            mine = slice(at, at + count)
            at += count
            current = group.live.row_of[samples[mine]]
            group.live.row_of[samples[mine]] = np.where(current == sorted_rows[mine], -1, current)
            group.rows -= count
            self._close_if_over(group)
        self.rows.free(rows)

    def _close_if_over(self, group: ForkGroup) -> None:
        if group.pending or group.rows:
            return
        self.deferred.add_blocks(group.blocks, group.last_flight)
        self.groups.drop(group)

    def _park(self, group: ForkGroup) -> int:
        blocks = self.admission.park(group)
        self.deferred.add_blocks(blocks, group.last_flight)
        return int(np.count_nonzero(self.pool.refs[blocks] == 1))

    def _resume(self, row: int) -> None:
        """A preempted row goes back into the line as a group of one, with all it has made."""
        columns, group = self.rows, self.groups[int(self.rows.group[row])]
        one = np.array([row], np.int32)
        _, output = self.outputs.gather(one, columns.prompt[one], columns.read[one] + 1)
        tokens = np.concatenate((group.tokens[: group.live.prompt_length], output))
        sample = columns.sample[one].copy()
        resumed = self.groups.add(group.live, tokens, sample, int(columns.sent[row]))
        if columns.top[row] != NO_SCORES and columns.sent[row] <= columns.read[row]:
            resumed.scored = self.outputs.scores_of(row)
        self.admission.push(resumed)

    # --- generated blocks ---------------------------------------------------------------------------------------------

    def _kept_back(self, rows: Int32) -> Int32:
        """Of freed rows those that go at once; single samples with new full blocks wait for the tree to take them."""
        new = (self.rows.read[rows] >> 4) - self.rows.shared[rows]
        keep = (new > 0) & (self.rows.state[rows] == ENDED) & self.rows.single[rows]
        if self._distrusted:
            keep &= ~np.isin(rows, list(self._distrusted))
            self._distrusted -= set(rows.tolist())
        self._to_keep += rows[keep].tolist()
        rest: Int32 = rows[~keep]
        return rest

    def _keep_some(self) -> None:
        """Lets the tree take the full blocks of ended single samples, a step's budget of them, and frees their rows."""
        taken, budget = [], _TREE_BUDGET
        counts, firsts, bases, roots, blocks = [], [], [], [], []
        while self._to_keep and budget > 0:
            row = self._to_keep.pop()
            group = self.groups[int(self.rows.group[row])]
            first, stop = int(self.rows.shared[row]), int(self.rows.read[row]) >> 4
            taken.append(row)
            counts.append(stop - first)
            firsts.append(first)
            bases.append(group.base)
            roots.append(group.parent)
            blocks.append(self.rows.table[row, first:stop])
            budget -= stop - first
        self.tree.insert_chains(np.concatenate(blocks), counts, firsts, bases, roots)
        self._free(np.array(taken, np.int32))

    def check(self) -> None:
        """Restates who holds which block; for tests."""
        live = np.flatnonzero(self.rows.state != 0).astype(np.int32)
        held = [np.zeros(1, np.int32), self.rows.own_blocks(live)]
        in_steps = live[(self.rows.state[live] != ENDED) & (self.rows.state[live] != PREEMPTED)]
        rows, running = Counter(self.rows.group[live].tolist()), Counter(self.rows.group[in_steps].tolist())
        for group in self.groups:
            held.append(group.blocks)
            assert group.rows == rows[group.slot], "a group's count of rows is off"
            assert group.running == running[group.slot], "a group's count of running rows is off"
            assert group.pending or group.rows, "a group outlived its last tail"
        held += [blocks for _, blocks in self.deferred._blocks]
        counts = np.bincount(np.concatenate(held), minlength=self.pool.num_blocks)
        assert (counts == self.pool.refs).all(), "references and holders disagree"


def _counted(slots: Int32) -> tuple[list[int], list[int]]:
    values, counts = np.unique(slots, return_counts=True)
    return values.tolist(), counts.tolist()
