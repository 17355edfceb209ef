"""Drafts that the device makes by a copy rule, and a drafter that offers their number. They know
rows, no model."""

from __future__ import annotations

import numpy as np
import torch

from penstock.config import BLOCK_SIZE
from penstock.execute.device_step import DeviceStep
from penstock.execute.proposer import Drawn
from penstock.execute.runner import TorchRunner
from penstock.row_table import MAX_DRAFTS
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.step import Drafts, Int32


class Repeats:
    """Guesses that a row goes on as it went `period` tokens before."""

    follows = False

    def __init__(self, step: DeviceStep, period: int) -> None:
        self.rows, self.staging, self.period = step.rows, step.staging, period
        self.slot_token = step.kv.slot_token.view(-1)
        self.launched = 0
        self.warmed = list[int]()

    def warm(self, sizes: list[int]) -> None:
        self.warmed = sizes

    def launch(self, drawn: Drawn) -> None:
        assert drawn.proposes and drawn.hidden.shape[0] >= drawn.size >= drawn.rows > 0
        rows, self.launched = self.rows, self.launched + 1
        row = self.staging.rows[: drawn.size].to(torch.int64)
        length = rows.length[row]
        for at in range(MAX_DRAFTS):
            back = (length + 1 + at - self.period * (1 + at // self.period)).clamp(min=0)
            slot = (
                rows.block_table[row, back // BLOCK_SIZE].to(torch.int64) * BLOCK_SIZE
                + back % BLOCK_SIZE
            )
            rows.drafts[row, at] = torch.where(
                back == length, rows.last_token[row], self.slot_token[slot]
            )


class Counts:
    """Offers as many drafts as there may be."""

    most, reach = MAX_DRAFTS, MAX_DRAFTS
    proposes, follows, idle = MAX_DRAFTS, True, False

    def wants(self, rows: Int32) -> bool:
        return True

    def settled(self, rows: Int32, offered: Int32, right: Int32) -> None:
        """Learns nothing."""

    def offer(self, rows: Int32, lengths: Int32, most: Int32) -> Drafts:
        return Drafts(np.concatenate(([0], np.cumsum(most))).astype(np.int32), None)


def draft_by_device(runner: TorchRunner, scheduler: Scheduler, period: int) -> Repeats:
    """Has the device make drafts, and the scheduler offer them."""
    step = runner._state
    assert step is not None
    step.draw.proposer = made = Repeats(step, period)
    scheduler.drafting.drafter = Counts()
    return made
