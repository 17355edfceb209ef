"""DeviceRows: what the device knows of each live row, one tensor a fact, and the step's own bookkeeping of them.

It knows rows, blocks and ids; no sequences, no requests, no model. Everything here is whole-column work on the device
and asks nothing back, so that a step can be launched before the one before it has been read.

A row is `length` tokens whose K and V are stored, `last_token` (the token at position `length`, not stored yet) and
its block table. Once it is `done`, nothing of it changes until another sequence joins under its number.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.row_state import RowState, pack_joins
from penstock.row_table import JOIN_WORDS
from penstock.schedule.step import BAD_LOGITS, NO_TOKEN, SCRATCH_BLOCK, Int32, Joins


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A plan's array on the device; on the CPU the same memory. The array is ours by the runner's contract.

    To a GPU it goes through pinned memory, which torch keeps until the copy is done: nobody waits.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class DeviceRows(RowState):
    """The rows' columns, and the plain step's bookkeeping of them."""

    def join(self, joins: Joins) -> None:
        """Rows come to life. Their tables are scratch past what they bring."""
        packed = np.empty((joins.rows.size, JOIN_WORDS + joins.blocks.shape[1]), np.int32)
        pack_joins(joins, joins.records["bias_start"], packed)
        lines = to_device(packed, self.device)
        rows = lines[:, 0].to(torch.int64)
        place = self.word_base[1:] + rows[:, None] * self.word_stride[1:]
        self.words[place] = lines[:, 1:JOIN_WORDS]
        table = torch.full(
            (rows.shape[0], self.block_table.shape[1]), SCRATCH_BLOCK, dtype=torch.int32, device=self.device
        )
        table[:, : joins.blocks.shape[1]] = lines[:, JOIN_WORDS:]
        self.block_table.index_copy_(0, rows, table)

    def grow(self, new_blocks: Int32) -> None:
        """new_blocks [m, 3]: row, index in its table, block."""
        row, index, block = to_device(new_blocks, self.device).unbind(1)
        self.block_table[row.to(torch.int64), index.to(torch.int64)] = block

    def advance(self, rows: Tensor, length: Tensor, done: Tensor, drawn: Tensor) -> Tensor:
        """Takes a step's draw into the rows. rows [S] int64; length, done, drawn [S] -> what the host is told, [S]
        int32.

        length and done are the rows' columns as the step found them. A row that was done before tells NO_TOKEN and
        stays as it is; one with BAD_LOGITS is done from now on.
        """
        drawn = torch.where(done, NO_TOKEN, drawn)
        moved = drawn >= 0
        token = drawn.clamp(min=0)
        length = length + moved
        over = self.is_end[token.to(torch.int64)] & (self.ignore_eos[rows] == 0)
        over |= (self.stop_ids[rows] == token[:, None]).any(1)
        over |= length + 1 >= self.limit[rows]
        self.last_token.index_copy_(0, rows, torch.where(moved, drawn, self.last_token[rows]))
        self.length.index_copy_(0, rows, length)
        ended = done | (drawn == BAD_LOGITS) | (moved & over)
        self.done.index_copy_(0, rows, ended.to(torch.int32))
        return drawn
