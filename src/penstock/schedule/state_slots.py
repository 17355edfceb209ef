"""StateSlots: which slot of recurrent state holds what, where layers have such state.

    slot r of a row    the row's own. The dead row, behind the last, has the slot that padding goes
    to
    the empty slot     a sequence before its first token: never written
    the others         snapshots: a fork group's prompt on its way, from which its samples go on, or
    the state behind an
                       entry of the prefix tree, from which later prompts go on; the least recently
                       used goes first

A sequence's state is one slot in all such layers, and it only goes forward: whoever continues from
a point needs the state that was kept there, so a match of the prefix tree counts as far as a
snapshot lies. State is moved by StepPlan's moves, all of a step at once and before its forward. So
no slot is written and read by moves of one step: what a step moved or gave back is used again in
the next. The device runs steps in order: nobody waits for one to be read. It knows slots and the
tree's places; no rows' columns and no tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from penstock.errors import CapacityError
from penstock.schedule.step import Int32

_COMMON = 2  # slots behind the rows' own: the dead row's and the empty one


def first_snapshot(rows: int) -> int:
    """Returns the first slot that is no row's and serves no purpose of all."""
    return rows + _COMMON


class StateSlots:
    """Snapshots of one scheduler, and the moves that its next step makes. snapshots: their slots,
    the empty one before them; of none, there is no recurrent state and nothing is ever asked of
    this."""

    def __init__(self, snapshots: range) -> None:
        self.count = len(snapshots)
        self.empty = snapshots.start - 1
        self._snapshots = snapshots
        self._free = [*reversed(snapshots)]
        # the tree's place -> slot, the least recently used first
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._of_tree: set[int] = set()  # the slots of these
        self._moves: list[Int32] = []
        self._moved: set[int] = set()  # slots that moves of the coming step read or write
        self._written: set[int] = set()  # of these, the ones that are written
        self._given_back: list[int] = []
        self.hits = self.evictions = (
            0  # prompts that began behind a snapshot; snapshots that made room
        )
        self.misses = 0  # prompts of whose blocks the tree knew more than it had the state of

    def __bool__(self) -> bool:
        return self.count > 0

    @property
    def waits(self) -> bool:
        """Returns whether the coming step has moves to make."""
        return bool(self._moves)

    @property
    def available(self) -> int:
        """Returns how many slots take() can give."""
        return len(self._free) + len(self._of_tree) - len(self._of_tree & self._moved)

    def take(self) -> int:
        """Gives a slot, a snapshot's where none is free. The caller has looked at `available`."""
        if not self._free:
            place = next(
                (place for place, slot in self._kept.items() if slot not in self._moved), None
            )
            if place is None:
                raise CapacityError("all slots of recurrent state are in use")
            self._free.append(self._drop(place))
            self.evictions += 1
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Takes a slot back. One that the coming step moves is given again once that is
        launched."""
        (self._given_back if slot in self._moved else self._free).append(slot)

    def move(self, source: int, targets: Int32) -> None:
        """Has the coming step give each of the target slots what the source holds."""
        written = targets.tolist()
        self._moved |= {source, *written}
        self._written.update(written)
        self._moves.append(np.stack((np.full(targets.size, source, np.int32), targets), axis=1))

    def launched(self) -> Int32:
        """Returns the moves [m, 2] of the step that is launched now, from and to."""
        moves = np.concatenate(self._moves) if self._moves else np.zeros((0, 2), np.int32)
        self._free += self._given_back
        self._moves, self._moved, self._written, self._given_back = [], set(), set(), []
        return moves

    # --- the prefix tree's ------------------------------------------------------------------------

    def has(self, place: int) -> bool:
        """Returns whether the state behind a place of the tree is kept, and there before the coming
        step."""
        return place in self._kept and self._kept[place] not in self._written

    def begin(self, place: int) -> int:
        """Returns a slot of the caller's own that will hold the state behind `place`: the empty
        one's where no snapshot lies there. The caller has looked at `available`."""
        source = self._kept[place] if self.has(place) else self.empty
        self.hits += source != self.empty
        if source != self.empty and source not in self._moved and self.available == 1:
            return self._drop(place)  # there is no other
        self._moved.add(source)  # so that it isn't what is taken
        slot = self.take()
        self.move(source, np.array([slot], np.int32))
        if source != self.empty:
            self._kept.move_to_end(place)
        return slot

    def keep(self, slot: int, place: int) -> None:
        """Keeps what a slot holds before the coming step's forward as the state behind `place`,
        where there is room."""
        if place in self._kept or slot in self._written or not self.available:
            return
        self._moved.add(slot)
        target = self.take()
        self.move(slot, np.array([target], np.int32))
        self._kept[place] = target
        self._of_tree.add(target)

    def forget(self, places: Iterable[int]) -> None:
        """Lets go of the states behind places that the tree has no more."""
        for place in places:
            if place in self._kept:
                self.give_back(self._drop(place))

    def _drop(self, place: int) -> int:
        """Keeps the state behind a place no more; returns its slot."""
        slot = self._kept.pop(place)
        self._of_tree.discard(slot)
        return slot

    def check(self, held: list[int]) -> None:
        """Restates the invariants; for tests. held: slots that fork groups have."""
        assert self._of_tree == {*self._kept.values()}, "the tree's slots are off"
        every = [*self._free, *self._given_back, *self._kept.values(), *held]
        assert sorted(every) == [*self._snapshots], (
            "a slot of recurrent state is lost, or in two places"
        )
        sources = {int(source) for moves in self._moves for source in moves[:, 0]}
        targets = [int(target) for moves in self._moves for target in moves[:, 1]]
        assert len(set(targets)) == len(targets) and not sources & set(targets), (
            "a step reads a slot that it writes"
        )
        assert self.empty not in targets, "the empty slot is written"
