"""Drafts that the device makes by a copy rule, and a drafter that offers their number. They know
rows, no model."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.execute.runner import TorchRunner
from penstock.kernels.row_state import RowState
from penstock.row_table import MAX_DRAFTS
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.step import Drafts, Int32


class Repeats:
    """Guesses that a row goes on as it went `period` tokens before."""

    def __init__(self, slot_token: Tensor, period: int) -> None:
        self.slot_token, self.period = slot_token.view(-1), period
        self.launched = 0

    def launch(self, rows: RowState, row_ids: Tensor, told: Tensor, hidden: Tensor) -> None:
        assert told.shape == row_ids.shape and hidden.shape[0] >= row_ids.shape[0]
        row, self.launched = row_ids.to(torch.int64), self.launched + 1
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

    most, most_rows = MAX_DRAFTS, 1 << 30
    proposes = True

    def pause(self) -> None:
        """Never needed: it has drafts for any number of rows."""

    def settled(self, rows: Int32, offered: Int32, right: Int32) -> None:
        """Learns nothing."""

    def offer(self, rows: Int32, lengths: Int32, most: Int32) -> Drafts:
        return Drafts(np.concatenate(([0], np.cumsum(most))).astype(np.int32), None)


def draft_by_device(runner: TorchRunner, scheduler: Scheduler, period: int) -> Repeats:
    """Has the device make drafts, and the scheduler offer them."""
    step = runner._state
    assert step is not None
    step.draw.proposer = made = Repeats(step.kv.slot_token, period)
    scheduler.drafting.drafter = Counts()
    return made
