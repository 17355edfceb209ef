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

from penstock.config import BLOCK_SIZE
from penstock.request import MAX_STOP_IDS
from penstock.schedule.step import BAD_LOGITS, NO_TOKEN, SCRATCH_BLOCK, Int32, Joins


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A plan's array on the device; on the CPU the same memory. The array is ours by the runner's contract.

    To a GPU it goes through pinned memory, which torch keeps until the copy is done: nobody waits.
    """
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


class DeviceRows:
    """Columns of `max_rows` rows, and of one dead row behind them that padding may point at."""

    def __init__(
        self, max_rows: int, max_model_len: int, end_ids: tuple[int, ...], vocabulary: int, device: torch.device
    ) -> None:
        self.device = device
        self.max_model_len = max_model_len
        rows = max_rows + 1

        def column(dtype: torch.dtype, fill: float = 0) -> Tensor:
            return torch.full((rows,), fill, dtype=dtype, device=device)

        self.last_token = column(torch.int32)
        self.length = column(torch.int32)  # tokens stored
        self.done = column(torch.bool, True)
        self.limit = column(torch.int32)  # done once the token of position limit - 1 is drawn
        self.prompt_length = column(torch.int32)
        self.min_length = column(torch.int32)
        self.sample = column(torch.int32)
        self.seed = column(torch.int64)
        self.temperature = column(torch.float32)
        self.top_p = column(torch.float32, 1.0)
        self.top_k = column(torch.int32)
        self.min_p = column(torch.float32)
        self.repetition = column(torch.float32, 1.0)
        self.presence = column(torch.float32)
        self.frequency = column(torch.float32)
        self.ignore_eos = column(torch.bool)
        # Read on the device alone, where kernels index the rows themselves:
        self.wants = column(torch.int32)  # WANTS_* bits
        self.logprobs = column(torch.int32, -1)
        self.bias_start = column(torch.int32)  # where the row's biases lie in the device's pool
        self.bias_count = column(torch.int32)
        self.stop_ids = torch.full((rows, MAX_STOP_IDS), -1, dtype=torch.int32, device=device)
        blocks = -(-max_model_len // BLOCK_SIZE)
        self.block_table = torch.full((rows, blocks), SCRATCH_BLOCK, dtype=torch.int32, device=device)
        self.end_ids = torch.tensor(sorted(set(end_ids)), dtype=torch.int64, device=device)
        self.is_end = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.is_end[self.end_ids] = True

    def join(self, joins: Joins) -> None:
        """Rows come to life. Their tables are scratch past what they bring."""
        rows = self._send(joins.rows).to(torch.int64)
        asked = joins.sampling
        for column, values in (
            (self.last_token, joins.last_token), (self.length, joins.length), (self.limit, joins.limit),
            (self.prompt_length, joins.prompt_length), (self.min_length, joins.min_length),
            (self.sample, joins.samples), (self.seed, asked.seed), (self.temperature, asked.temperature),
            (self.top_p, asked.top_p), (self.top_k, asked.top_k), (self.min_p, asked.min_p),
            (self.repetition, asked.repetition), (self.presence, asked.presence),
            (self.frequency, asked.frequency), (self.ignore_eos, asked.ignore_eos), (self.stop_ids, asked.stop_ids),
        ):  # fmt: skip
            column.index_copy_(0, rows, self._send(values).to(column.dtype))
        table = torch.full(
            (rows.shape[0], self.block_table.shape[1]), SCRATCH_BLOCK, dtype=torch.int32, device=self.device
        )
        table[:, : joins.blocks.shape[1]] = self._send(joins.blocks)
        self.block_table.index_copy_(0, rows, table)
        self.done.index_fill_(0, rows, False)

    def grow(self, new_blocks: Int32) -> None:
        """new_blocks [m, 3]: row, index in its table, block."""
        row, index, block = self._send(new_blocks).unbind(1)
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
        over = self.is_end[token.to(torch.int64)] & ~self.ignore_eos[rows]
        over |= (self.stop_ids[rows] == token[:, None]).any(1)
        over |= length + 1 >= self.limit[rows]
        self.last_token.index_copy_(0, rows, torch.where(moved, drawn, self.last_token[rows]))
        self.length.index_copy_(0, rows, length)
        self.done.index_copy_(0, rows, done | (drawn == BAD_LOGITS) | (moved & over))
        return drawn

    def _send(self, array: NDArray[np.generic]) -> Tensor:
        return to_device(array, self.device)
