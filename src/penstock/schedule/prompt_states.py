"""PromptStates: the recurrent state of prompts. It is created when a fork group's prompt begins,
kept for later prompts, copied to the group's rows, and freed.

    prompt begins       its group takes a slot, with the state behind its cached beginning
    a border is reached its chunks pause for one step, in which the state is kept for later prompts.
                        Borders: the end of the blocks shared with another prompt, and the last
                        block border before the part that a chat's next turn lacks
    samples join          each row's slot gets a copy of the group's state
    last sample joined, or the group waits again   its slot is freed

Knows fork groups and slots; no rows' columns, no blocks.
"""

from __future__ import annotations

from penstock.config import BLOCK_SIZE
from penstock.schedule.request_state import ForkGroup
from penstock.schedule.state_slots import StateSlots
from penstock.schedule.step import Int32

# most tokens of a chat template's generation prompt (such as `<|assistant|>`), which a chat's next
# turn lacks
GENERATION_PROMPT = 16


class PromptStates:
    """Recurrent states of one scheduler's fork groups. keeps: True: keep snapshots for later
    prompts. Without slots (no recurrent state) all methods do nothing."""

    def __init__(self, slots: StateSlots, keeps: bool) -> None:
        self.slots, self._keeps = slots, keeps
        # groups that pause at a border: their state is kept in the next step
        self._paused: list[ForkGroup] = []

    def __bool__(self) -> bool:
        return bool(self.slots)

    @property
    def full(self) -> bool:
        """Returns True if no state slot is left for a further prompt."""
        return bool(self.slots) and not self.slots.available

    def begin(self, group: ForkGroup, shared: int) -> None:
        """Takes a slot for a prompt that begins after `group.place`. shared: number of its leading
        blocks that the prefix tree knows, some perhaps without a snapshot."""
        if self.slots:
            self.slots.misses += shared * BLOCK_SIZE > group.stored
            group.state_slot = self.slots.begin(group.place)
            last = max(0, group.target - GENERATION_PROMPT) // BLOCK_SIZE * BLOCK_SIZE
            group.borders = sorted({shared * BLOCK_SIZE, last}) if self._keeps else []

    def border(self, group: ForkGroup) -> int:
        """Returns the position up to which a prompt may be planned in one go: its next border, or
        its end."""
        return next((border for border in group.borders if border > group.stored), group.target)

    def advanced(self, group: ForkGroup, number: int) -> None:
        """Notes that step `number` prefills more of a prompt; at a border the prompt pauses until
        the next step."""
        if group.stored in group.borders:
            self._paused.append(group)
            group.ready_from = number + 1

    def keep(self) -> None:
        """Keeps the states of prompts paused at a border, in the next step."""
        for group in self._paused:
            if group.state_slot >= 0:
                self.slots.keep(group.state_slot, group.place)
        self._paused = []

    def fork(self, group: ForkGroup, rows: Int32) -> None:
        """Copies the group's state to joining rows; after its last sample the group's slot is
        freed."""
        if self.slots:
            self.slots.move(group.state_slot, rows)
            if not group.pending:
                self.give_back(group)

    def give_back(self, group: ForkGroup) -> None:
        """Frees a group's slot of recurrent state, if it has one."""
        if group.state_slot >= 0:
            self.slots.give_back(group.state_slot)
            group.state_slot = -1
