"""StateSlots: assigns slots of recurrent state.

    slots of the rows  row r has slot r. The dead row, after the last, has the slot for padding
    the empty slot     a sequence before its first token: never written
    all other slots    snapshots: the state of a fork group's prompt under way, from which its
                       samples go on, or the state behind an entry of the prefix tree, from which
                       later prompts go on; the least recently used is evicted first

A sequence's recurrent state takes the same slot in all recurrent layers. It cannot be rolled back:
to continue from a position, a snapshot from exactly there is needed, so a match in the prefix tree
can be used only up to a snapshot. StepPlan's moves copy states, all of a step at once, before its
forward. No slot may be both read and written by moves of one step, so slots moved or freed in a
step are reused only in the next. The device runs steps in order, so no step has to be read first.
Knows slots and the tree's places; no rows' columns and no tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from penstock.errors import CapacityError
from penstock.schedule.step import Int32

# number of slots between the rows' and the snapshots': the dead row's and the empty one
_COMMON = 2


def first_snapshot(rows: int) -> int:
    """Returns the first snapshot slot, after the slots of `rows` rows and the two common ones."""
    return rows + _COMMON


class StateSlots:
    """Assigns the snapshot slots of one scheduler, and collects the moves of its next step.
    snapshots: their slot numbers; the empty slot is the number before them. An empty range: the
    model has no recurrent state."""

    def __init__(self, snapshots: range) -> None:
        self.count = len(snapshots)
        self.empty = snapshots.start - 1
        self._snapshots = snapshots
        self._free = [*reversed(snapshots)]
        # place in the prefix tree -> slot, least recently used first
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._of_tree: set[int] = set()  # slots of the snapshots in _kept
        self._moves: list[Int32] = []
        self._moved: set[int] = set()  # slots read or written by moves of the next step
        self._written: set[int] = set()  # slots written by moves of the next step
        self._given_back: list[int] = []
        self.hits = self.evictions = (
            # counters. hits: prompts that began from a snapshot. evictions: snapshots dropped for
            # room
            0
        )
        self.misses = 0  # prompts of which more blocks are cached than a snapshot allows to use

    def __bool__(self) -> bool:
        return self.count > 0

    @property
    def waits(self) -> bool:
        """Returns True if the next step must copy state."""
        return bool(self._moves)

    @property
    def available(self) -> int:
        """Returns the number of slots that take() can give."""
        return len(self._free) + len(self._of_tree) - len(self._of_tree & self._moved)

    def take(self) -> int:
        """Returns a slot, evicting a snapshot if none is free. The caller has checked
        `available`."""
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
        """Frees a slot. A slot moved by the next step is reused only after its launch."""
        (self._given_back if slot in self._moved else self._free).append(slot)

    def move(self, source: int, targets: Int32) -> None:
        """Copies the source's state to each target slot in the next step."""
        written = targets.tolist()
        self._moved |= {source, *written}
        self._written.update(written)
        self._moves.append(np.stack((np.full(targets.size, source, np.int32), targets), axis=1))

    def launched(self) -> Int32:
        """Returns the moves [m, 2] (source, target) of the step launched now, and starts the next
        list."""
        moves = np.concatenate(self._moves) if self._moves else np.zeros((0, 2), np.int32)
        self._free += self._given_back
        self._moves, self._moved, self._written, self._given_back = [], set(), set(), []
        return moves

    # --- snapshots of the prefix tree -------------------------------------------------------------

    def has(self, place: int) -> bool:
        """Returns True if there is a snapshot for a place in the prefix tree that was written
        before the next step."""
        return place in self._kept and self._kept[place] not in self._written

    def begin(self, place: int) -> int:
        """Returns a slot, owned by the caller, that gets a copy of the snapshot for `place`, or the
        empty state if there is none. The caller has checked `available`."""
        source = self._kept[place] if self.has(place) else self.empty
        self.hits += source != self.empty
        if source != self.empty and source not in self._moved and self.available == 1:
            return self._drop(place)  # no other slot is available: use the snapshot's own slot
        self._moved.add(source)  # mark the snapshot as used, so that take() does not evict it
        slot = self.take()
        self.move(source, np.array([slot], np.int32))
        if source != self.empty:
            self._kept.move_to_end(place)
        return slot

    def keep(self, slot: int, place: int) -> None:
        """Keeps a snapshot of a slot's state, as it is before the next step's forward, for `place`,
        if there is room."""
        if place in self._kept or slot in self._written or not self.available:
            return
        self._moved.add(slot)
        target = self.take()
        self.move(slot, np.array([target], np.int32))
        self._kept[place] = target
        self._of_tree.add(target)

    def forget(self, places: Iterable[int]) -> None:
        """Drops the snapshots for places that the prefix tree has removed."""
        for place in places:
            if place in self._kept:
                self.give_back(self._drop(place))

    def _drop(self, place: int) -> int:
        """Drops the snapshot for a place; returns its slot."""
        slot = self._kept.pop(place)
        self._of_tree.discard(slot)
        return slot

    def check(self, held: list[int]) -> None:
        """Checks the invariants; for tests. held: slots of fork groups."""
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
