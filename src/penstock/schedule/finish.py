"""Finish: ends samples and frees their rows and blocks. A sample ends by its last token or a
cancel. Its row and blocks are freed once every step in flight that names them has been read.

    running --token, limit, cancel--> ended --steps read--> free, blocks released (if n = 1, its
    full blocks go to the tree)

Knows rows, groups, blocks and the prefix tree; not how tokens are read, nor which rows are
preempted.
"""

from __future__ import annotations

from collections import Counter
from itertools import compress

import numpy as np

from penstock.config import BLOCK_SIZE
from penstock.schedule.admission import Admission
from penstock.schedule.blocks import BlockPool
from penstock.schedule.deferred_free import DeferredFree
from penstock.schedule.forecast import LengthModel
from penstock.schedule.prefix_tree import PrefixTree
from penstock.schedule.request_state import ForkGroup, Groups, RequestState
from penstock.schedule.rows import ENDED, FREE, PREEMPTED, Rows, counted
from penstock.schedule.step import Bool, Int32

_TREE_BUDGET = 512  # most generated blocks inserted into the prefix tree per step


class Finisher:
    """Ends samples, frees their rows and blocks, and inserts generated blocks of single samples (n
    = 1) into the prefix tree."""

    def __init__(
        self,
        rows: Rows,
        pool: BlockPool,
        tree: PrefixTree,
        groups: Groups,
        admission: Admission,
        lengths: LengthModel,
        deferred: DeferredFree,
    ) -> None:
        self.rows, self.pool, self.tree, self.groups = rows, pool, tree, groups
        self.admission, self.lengths, self.deferred = admission, lengths, deferred
        # rows whose logits were not finite, until the rows are free
        self._distrusted: set[int] = set()
        # ended rows whose generated blocks are not yet inserted into the prefix tree
        self._to_keep: list[int] = []
        # requests and samples to be ended together
        self._cancelled: list[tuple[RequestState, int]] = []

    @property
    def waits(self) -> bool:
        """Returns True if rows or blocks that left the steps are not free yet."""
        return not self.deferred.empty or bool(self._to_keep)

    def ended(self, rows: Int32) -> list[RequestState]:
        """Ends rows whose last token was read; returns their requests."""
        if not rows.size:
            return []
        found = self._observe(rows)
        for group, count in found:
            group.live.outstanding -= count
        self.deferred.leave(rows, ENDED)
        return [group.live for group, _ in found]

    def invalidate(self, rows: Int32) -> None:
        """Takes all blocks of rows with non-finite logits, prompt blocks included, out of the
        prefix tree.

        Prompt blocks are in the tree from the moment they are planned; later requests now compute
        them anew. Rows that already share them keep them, and detect the fault by their own logits.
        """
        if not rows.size or not self.tree.enabled:
            return
        self._distrusted |= set(rows.tolist())
        tables = [self.rows.table[row, : self.rows.blocks[row]] for row in rows.tolist()]
        self.tree.drop(np.unique(np.concatenate(tables)))

    def _observe(self, rows: Int32) -> list[tuple[ForkGroup, int]]:
        """Gives the lengths of ended samples to the forecast; returns their fork groups, each with
        its number of ended samples. Samples limited to one token, such as label scores, tell
        nothing about other lengths, so the forecast does not get them."""
        columns = self.rows
        prompt, slot = columns.prompt.take(rows), columns.group.take(rows)
        outputs = columns.read_length.take(rows) - prompt + np.int32(1)
        self.lengths.observe(outputs[columns.limit.take(rows) - prompt > 1])
        slots, counts = counted(slot)
        found = list(zip(self.groups.at(slots.tolist()), counts.tolist(), strict=True))
        totals = np.bincount(slot, weights=outputs).take(slots)
        for (group, count), total in zip(found, totals.tolist(), strict=True):
            group.finished += count
            group.finished_tokens += int(total)
        return found

    def cancel(self, live: RequestState) -> None:
        """Ends a whole request. Samples without a row end at once; rows end once their steps in
        flight are read."""
        for group in list(live.groups):
            self._drop_pending(group, group.samples[:0])
        rows = live.living(self.rows)
        live.outstanding -= rows.size
        self.deferred.leave(rows, ENDED)

    def cancel_soon(self, live: RequestState, sample: int) -> None:
        """Ends one sample with the next call of `cancel_samples`, if the request has it. Stop
        strings end many samples in a step; together they take a tenth of the time."""
        if 0 <= sample < live.row_of.size:
            self._cancelled.append((live, sample))

    def cancel_samples(self) -> tuple[list[RequestState], dict[int, RequestState]]:
        """Ends the samples of `cancel_soon` as `cancel` does; returns their requests, and those of
        the samples that had a row, by row. Their lengths count for the forecast; a cancelled
        request's don't."""
        if not self._cancelled:
            return [], {}
        asked, self._cancelled = self._cancelled, []
        for live, sample in asked:
            for group in list(live.groups):
                pending = group.samples[group.next :]
                self._drop_pending(group, pending[pending != sample])
        columns, lives = self.rows, [live for live, _ in asked]
        rows = np.array([live.row_of[sample] for live, sample in asked], np.int32)
        its: Bool = (rows >= 0) & (columns.state[rows] > ENDED)
        its &= columns.request[rows] == [live.request_id for live in lives]
        its &= columns.sample[rows] == [sample for _, sample in asked]
        by_row = dict(compress(zip(rows.tolist(), lives, strict=True), its.tolist()))
        for live in by_row.values():
            live.outstanding -= 1
        if by_row:
            ended = np.array([*by_row], np.int32)
            self._observe(ended)
            self.deferred.leave(ended, ENDED)
        return lives, by_row

    def _drop_pending(self, group: ForkGroup, stay: Int32) -> None:
        """Ends the samples of a group that have no row, but for `stay`."""
        if stay.size < group.pending:
            group.live.outstanding -= group.pending - stay.size
            group.drop_pending(stay)
            if not stay.size:
                self.admission.remove(group)
                self._close_if_over(group)

    def free(self, rows: Int32, blocks: list[Int32]) -> None:
        """Frees rows, and blocks of fork groups, that no step in flight names."""
        if blocks:
            self.pool.release(np.concatenate(blocks))
        self._free(self._kept_back(rows) if self.tree.enabled else rows)
        if self._to_keep:
            self._keep_some()

    def _free(self, rows: Int32) -> None:
        if not rows.size:
            return
        self.pool.release(self.rows.own_blocks(rows))
        slots, counts = counted(self.rows.group.take(rows))
        for group, count in zip(self.groups.at(slots.tolist()), counts.tolist(), strict=True):
            group.rows -= count
            if not group.rows:
                self._close_if_over(group)
        self.rows.free(rows)

    def _close_if_over(self, group: ForkGroup) -> None:
        if group.pending or group.rows:
            return
        self.deferred.add_blocks(group.blocks, group.last_flight)
        self.groups.drop(group)

    # --- keeping generated blocks in the prefix tree ----------------------------------------------

    def _kept_back(self, rows: Int32) -> Int32:
        """Returns the rows to free at once. Single samples (n = 1) with new full blocks are kept
        back until these blocks are in the prefix tree."""
        keep = (
            (self._new_blocks(rows) > 0) & (self.rows.state[rows] == ENDED) & self.rows.single[rows]
        )
        if self._distrusted:
            keep &= ~np.isin(rows, list(self._distrusted))
            self._distrusted -= set(rows.tolist())
        self._to_keep += rows[keep].tolist()
        rest: Int32 = rows[~keep]
        return rest

    def _new_blocks(self, rows: Int32) -> Int32:
        """Returns, for rows [k], the number of full blocks after their fork group's shared ones, up
        to the last token read."""
        new: Int32 = self.rows.read_length[rows] // BLOCK_SIZE - self.rows.shared[rows]
        return new

    def _keep_some(self) -> None:
        """Inserts full blocks of ended single samples into the prefix tree, at most _TREE_BUDGET
        per step, and frees their rows."""
        counts = np.cumsum(self._new_blocks(np.array(self._to_keep[::-1], np.int32)))
        count = 1 + int(np.searchsorted(counts, _TREE_BUDGET))
        rows = np.array(self._to_keep[: -count - 1 : -1], np.int32)
        del self._to_keep[-count:]
        groups = self.groups.at(self.rows.group[rows].tolist())
        first, new = self.rows.shared[rows], self._new_blocks(rows)
        blocks = self.rows.entries(rows, first, new)
        self.tree.insert_chains(blocks, new, [group.place for group in groups])
        self._free(rows)

    def check(self) -> None:
        """Checks that block references match their holders; for tests."""
        live = np.flatnonzero(self.rows.state != FREE).astype(np.int32)
        held = [np.zeros(1, np.int32), self.rows.own_blocks(live)]
        in_steps = live[(self.rows.state[live] != ENDED) & (self.rows.state[live] != PREEMPTED)]
        rows, running = (
            Counter(self.rows.group[live].tolist()),
            Counter(self.rows.group[in_steps].tolist()),
        )
        for group in self.groups:
            held.append(group.blocks)
            assert group.rows == rows[group.slot], "a group's count of rows is off"
            assert group.running == running[group.slot], "a group's count of running rows is off"
            assert group.pending or group.rows, "a group outlived its last tail"
        held += [blocks for _, blocks in self.deferred._blocks]
        counts = np.bincount(np.concatenate(held), minlength=self.pool.num_blocks)
        assert (counts == self.pool.refs).all(), "references and holders disagree"
