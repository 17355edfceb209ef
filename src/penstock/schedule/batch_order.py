"""BatchOrder: orders the rows of a step. Rows of one prefix group stand side by side.

Keeps the list of running rows and the current prefix groups between steps, and rebuilds both only
when rows joined or left. Knows rows and groups; not admission, not tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.config import BLOCK_SIZE
from penstock.row_table import WANTS_ANY
from penstock.schedule.blocks import BlockPool
from penstock.schedule.prefix_groups import PrefixGroup, SharingCosts, Unit, find_groups
from penstock.schedule.request_state import ForkGroup, Groups
from penstock.schedule.rows import RUNNING, Rows
from penstock.schedule.step import SCRATCH_BLOCK, Bool, Int32, Int64

# steps between two searches for prefix groups, if there are more than `few` fork groups (units)
_PATIENCE = 8
# one more step between searches for every _SPREAD fork groups that may form prefix groups
_SPREAD = 64


@dataclass(slots=True)
class Order:
    """Rows of a step and their prefix groups, as in StepPlan. Read-only: the next step may reuse
    it."""

    rows: Int32
    start: Int32
    blocks: Int32
    length: Int32
    active: Bool  # [size of the row table]: True if the row is in `rows`
    wants: int


class BatchOrder:
    """Chooses the rows of each step and their order."""

    def __init__(
        self,
        rows: Rows,
        groups: Groups,
        pool: BlockPool,
        sharing: SharingCosts | None,
        few: int = 64,
    ) -> None:
        """sharing: savings and costs of prefix groups; None: no prefix groups. few: with up to so
        many running fork groups, prefix groups are searched again at every change; with more, every
        few steps."""
        self.rows, self.groups, self.pool, self.sharing, self.few = rows, groups, pool, sharing, few
        self.changed = True  # True if rows joined or left since the last step
        self._running: Int32 = np.zeros(0, np.int32)
        self._ordered: tuple[Int32, Order] | None = (
            None  # the argument `rows` of the last step, and its Order
        )
        self._units: dict[int, ForkGroup] = {}  # slot -> fork group with running samples
        self._stale = False  # True if fork groups changed since the last search for prefix groups
        self._found_at = 0
        self._patience = _PATIENCE
        # fork group slot -> index of its prefix group, or _alone if it has none
        self._place: Int32 = np.zeros(64, np.int32)
        self._tails: Int32 = np.zeros(64, np.int32)  # fork group slot -> number of running samples
        # _tails at the last search for groups; 0: in no prefix group
        self._tails_then: Int32 = np.zeros(64, np.int32)
        # fork group slot -> first full block, or the scratch block
        self._first: Int32 = np.zeros(64, np.int32)
        # fork group slot -> True if it is a prefix group by itself, over all its full blocks
        self._whole: Bool = np.zeros(64, np.bool_)
        self._alone = 0
        self._prefixes: list[PrefixGroup] = []

    def running(self) -> Int32:
        """Returns the rows that run, in ascending order. Read-only."""
        if self.changed:
            self._running = (self.rows.state == RUNNING).nonzero()[0].astype(np.int32)
            self.changed = False
        return self._running

    def lasts(self, rows: Int32) -> bool:
        """Returns True if the next step has the last step's rows, `rows`, in the same prefix
        groups."""
        return (
            not self.changed
            and not self._stale
            and self._ordered is not None
            and self._ordered[1].rows is rows
        )

    def joined(self, group: ForkGroup) -> None:
        """Notes that samples of this fork group joined. If the fork group is a prefix group over
        all its blocks, further samples do not change the grouping."""
        self.changed = True
        slot = group.slot
        if slot not in self._units:
            self._units[slot] = group
            self._stale = True
            if slot >= self._place.size:
                more = np.zeros(slot + 64, np.int32)
                self._place = np.concatenate((self._place, more))
                self._tails = np.concatenate((self._tails, more))
                self._tails_then = np.concatenate((self._tails_then, more))
                self._first = np.concatenate((self._first, more))
                self._whole = np.concatenate((self._whole, more.astype(np.bool_)))
            self._place[slot] = self._alone
            self._tails_then[slot] = 0
            self._whole[slot] = False
            self._first[slot] = group.blocks[0] if group.full else SCRATCH_BLOCK
        elif not self._whole[slot]:
            self._stale = True
        self._tails[slot] = group.running

    def removed(self, slots: Int32, counts: Int64 | Int32) -> None:
        """Notes that counts[i] samples of the fork group in slot slots[i] left; slots are distinct.
        Once half of a prefix group's samples have left, it may cost more than it saves, so prefix
        groups are searched again."""
        self.changed = True
        tails = self._tails[slots] - counts
        self._tails[slots] = tails
        self._stale |= bool((tails * 2 < self._tails_then[slots]).any())
        for slot in slots[tails == 0].tolist():
            del self._units[slot]
            self._stale = True

    def order(self, rows: Int32, number: int) -> Order:
        """Returns the Order of step `number`, in which `rows` run."""
        if self._stale and (
            len(self._units) <= self.few or number - self._found_at >= self._patience
        ):
            self._find(number)
        elif self._ordered is not None and rows is self._ordered[0]:
            return self._ordered[1]
        active: Bool = self.rows.state == RUNNING
        if np.count_nonzero(active) != rows.size:  # some running rows are not in this step
            active = np.zeros(self.rows.count, np.bool_)
            active[rows] = True
        # check the whole table first: selecting the step's rows costs six times as much
        any_wants = self.rows.wants.any()
        wants = (
            int(np.bitwise_or.reduce(self.rows.wants.take(rows), initial=0)) & WANTS_ANY
            if any_wants
            else 0
        )
        order = Order(*self._grouped(rows), active, wants)
        self._ordered = rows, order
        return order

    def _grouped(self, rows: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """Returns the rows, with members of a prefix group side by side, and the arrays
        group_start, group_blocks and group_length (StepPlan)."""
        alone = self._alone
        if not alone:
            return rows, np.zeros(1, np.int32), np.zeros((0, 0), np.int32), np.zeros(0, np.int32)
        place = self._place.take(self.rows.group.take(rows))
        if alone < 2**16:
            # radix sort on short integers: one pass per byte
            place = place.astype(np.uint8 if alone < 2**8 else np.uint16)
        rows = rows.take(np.argsort(place, kind="stable"))
        sizes = np.bincount(place, minlength=alone + 1)[:alone]
        present = np.flatnonzero(sizes)
        start = np.zeros(present.size + 1, np.int32)
        np.cumsum(sizes[present], out=start[1:])
        return rows, start, self._blocks[present], self._lengths[present]

    def _find(self, number: int) -> None:
        """Searches for prefix groups among the running fork groups."""
        self._stale, self._found_at = False, number
        if self.sharing is None:
            return
        units = self._may_group()
        self._patience = _PATIENCE + len(units) // _SPREAD
        self._prefixes = find_groups(units, self.pool.refs, self.sharing)
        self._alone = len(self._prefixes)
        self._place[:] = self._alone
        self._whole[:] = False
        self._tails_then[:] = 0
        width = max((prefix.blocks.size for prefix in self._prefixes), default=0)
        self._blocks = np.full((self._alone, width), SCRATCH_BLOCK, np.int32)
        self._lengths = np.zeros(self._alone, np.int32)
        for index, prefix in enumerate(self._prefixes):
            self._place[prefix.slots] = index
            self._tails_then[prefix.slots] = self._tails[prefix.slots]
            if len(prefix.slots) == 1:
                self._whole[prefix.slots[0]] = (
                    prefix.blocks.size == self._units[prefix.slots[0]].full
                )
            self._blocks[index, : prefix.blocks.size] = prefix.blocks
            self._lengths[index] = prefix.blocks.size * BLOCK_SIZE

    def _may_group(self) -> list[Unit]:
        """Returns the fork groups that may share a prefix: they have several running samples, or
        their first block is also held by another group."""
        slots = np.fromiter(self._units, np.int32, len(self._units))
        first = self._first[slots]
        may = (first != SCRATCH_BLOCK) & ((self._tails[slots] > 1) | (self.pool.refs[first] > 1))
        found = [self._units[slot] for slot in slots[may].tolist()]
        return [Unit(group.slot, group.blocks[: group.full], group.running) for group in found]
