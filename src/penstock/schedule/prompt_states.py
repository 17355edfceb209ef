"""PromptStates: the recurrent state of fork groups, where layers have such state: begun, kept,
forked, given back.

    a prompt begins   its group takes a slot, with the state behind what the prefix tree knows of it
    a border of it is planned   its chunks pause for a step, in which that state is kept for later
    prompts: behind the
                                blocks that another prompt begins with too, and behind its last full
                                one before
                                what a chat's next turn doesn't have
    tails join        each row's slot is given what the group's holds
    the last joined, or the group waits again   its slot is given back

It knows fork groups and slots; no rows' columns, no blocks.
"""

from __future__ import annotations

from penstock.config import BLOCK_SIZE
from penstock.schedule.request_state import ForkGroup
from penstock.schedule.state_slots import StateSlots
from penstock.schedule.step import Int32

# Tokens at a prompt's end that are in no later prompt, at most: a chat template's generation
# prompt.
GENERATION_PROMPT = 16


class PromptStates:
    """States of one scheduler's fork groups. keeps: for later prompts. Without slots nothing of it
    does anything."""

    def __init__(self, slots: StateSlots, keeps: bool) -> None:
        self.slots, self._keeps = slots, keeps
        self._paused: list[ForkGroup] = []  # whose state the coming step keeps

    def __bool__(self) -> bool:
        return bool(self.slots)

    @property
    def full(self) -> bool:
        """Returns whether no further prompt can begin."""
        return bool(self.slots) and not self.slots.available

    def begin(self, group: ForkGroup, shared: int) -> None:
        """Takes a slot for a prompt that begins behind `group.place`. shared: its leading blocks
        that the tree knows, of which others may lack the state."""
        if self.slots:
            self.slots.misses += shared * BLOCK_SIZE > group.stored
            group.state_slot = self.slots.begin(group.place)
            last = max(0, group.target - GENERATION_PROMPT) // BLOCK_SIZE * BLOCK_SIZE
            group.borders = sorted({shared * BLOCK_SIZE, last}) if self._keeps else []

    def border(self, group: ForkGroup) -> int:
        """Returns how far a prompt may be planned in one go: no further than its next border."""
        return next((border for border in group.borders if border > group.stored), group.target)

    def advanced(self, group: ForkGroup, number: int) -> None:
        """Notes that step `number` stores more of a prompt: at a border it pauses until the next
        one."""
        if group.stored in group.borders:
            self._paused.append(group)
            group.ready_from = number + 1

    def keep(self) -> None:
        """Keeps the states that lie at their prompts' borders, in the coming step."""
        for group in self._paused:
            if group.state_slot >= 0:
                self.slots.keep(group.state_slot, group.place)
        self._paused = []

    def fork(self, group: ForkGroup, rows: Int32) -> None:
        """Gives rows that join the group's state; the last ones leave it without."""
        if self.slots:
            self.slots.move(group.state_slot, rows)
            if not group.pending:
                self.give_back(group)

    def give_back(self, group: ForkGroup) -> None:
        """Gives a group's slot back, where it has one."""
        if group.state_slot >= 0:
            self.slots.give_back(group.state_slot)
            group.state_slot = -1
