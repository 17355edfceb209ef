"""DeviceSampler: draws a step's tokens from hidden states. It works in slices of rows, by kernels
that read the rows' sampling options on the device.

    per slice   head -> adjust (bias, penalties, bars, masks) -> sample -> filters -> logprobs of
                the chosen and most likely tokens -> logprobs of named ids
    at the end  advance: writes the tokens to the rows, and the host's results to `sampled_ids`

The launches are the same for every mix of rows: kernels skip rows that need nothing. Knows the
head, the rows and their columns; no plans.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.execute.kv_cache import zeros
from penstock.execute.rank_sampler import NOBODY, Asking, RankSampler, say
from penstock.execute.staging_buffer import to_device
from penstock.kernels.inputs import Queries
from penstock.kernels.ops import RowOps
from penstock.kernels.reference.sampling.label_logprobs import label_logprobs
from penstock.kernels.row_state import RowState
from penstock.models.decoder import Decoder
from penstock.request import MAX_LOGPROBS
from penstock.row_table import WANTS_ADJUST, WANTS_ANY, WANTS_FILTER, WANTS_LABELS, WANTS_LOGPROBS

Int32 = NDArray[np.int32]
# number of logit_bias values in the pool whose address CUDA graphs hold; if more are needed, the
# pool moves
BIAS_POOL = 1 << 18


class DeviceSampler:
    """Draws tokens. capacity: rows per step; slice_rows: rows of logits in memory at once;
    mask_slots: number of token masks."""

    def __init__(
        self,
        model: Decoder,
        ops: RowOps,
        rows: RowState,
        slot_token: Tensor,
        slice_rows: int,
        capacity: int,
        mask_slots: int,
    ) -> None:
        self._model, self._ops, self._rows, self._slot_token = model, ops, rows, slot_token
        self.slice_rows = min(slice_rows, capacity)
        device, vocabulary, part = rows.device, model.config.vocab_size, model.vocabulary
        self._scratch = ops.sample_scratch(self.slice_rows, model.head_rows, device)
        self._ranks = None if part is None else RankSampler(ops, rows, self._scratch, part)
        self.bias_ids = torch.zeros(BIAS_POOL, dtype=torch.int32, device=device)
        self.bias_values = torch.zeros(BIAS_POOL, dtype=torch.float32, device=device)
        # token masks int32 [mask slots, ceil(vocabulary / 32)]: bit t % 32 of word t // 32 is set
        # if token t is allowed. Graphs hold its address, so it never moves.
        self.masks = zeros((mask_slots, -(-vocabulary // 32)), torch.int32, device)
        # [capacity]: forced token of each query; -1: the token is drawn
        self.forced = torch.full((capacity,), -1, dtype=torch.int32, device=device)
        self._drawn = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.sampled_ids = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.chosen = torch.zeros(capacity, dtype=torch.float32, device=device)
        self.rank = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.nothing = torch.zeros((capacity, 0), device=device)
        self.pool_moved = False  # True once the bias pool has left the address that graphs hold

    def take_biases(self, first: int, ids: Tensor, values: Tensor) -> None:
        """Writes logit_bias values to the pool, from index `first` on. ids: token ids [m] int32.
        values: [m] float32."""
        last = first + ids.shape[0]
        if last > self.bias_ids.shape[0]:
            self.bias_ids, self.bias_values = (
                _longer(self.bias_ids, last),
                _longer(self.bias_values, last),
            )
            self.pool_moved = True
        self.bias_ids[first:last].copy_(ids)
        self.bias_values[first:last].copy_(values)

    def force(self, queries: NDArray[np.int64], tokens: Int32) -> None:
        """Forces the tokens of these queries in the next draw with `forces`, and of no others."""
        self.forced.fill_(-1)
        self.forced[to_device(queries, self.forced.device)] = to_device(tokens, self.forced.device)

    def launch(
        self,
        row_ids: Tensor,
        queries: Queries | None,
        position: Tensor,
        hidden: Tensor,
        wants: int,
        most: int = 0,
        asking: Asking = NOBODY,
        forces: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Draws tokens: row_ids [S] int32 and positions [S] of queries, hidden [S or more, d] ->
        sampled_ids[:S], and with WANTS_LOGPROBS chosen[:S], rank[:S]. Returns ids and logprobs [S,
        most] of the most likely tokens.

        wants: OR of the rows' WANTS_* bits. most: number of most likely tokens. asking:
        queries with filters and with logprobs, if ranks share the vocabulary. forces: use the
        tokens given to `force`.
        """
        count = row_ids.shape[0]
        device = hidden.device
        ids = torch.empty((count, most), dtype=torch.int32, device=device)
        top = torch.empty((count, most), dtype=torch.float32, device=device)
        for first in range(0, count, self.slice_rows):
            last = min(first + self.slice_rows, count)
            part = slice(first, last)
            some, forced = asking.within(first, last), self.forced[part] if forces else None
            told = ids[part], top[part]
            self._slice(
                row_ids[part], position[part], hidden[part], first, wants, most, told, some, forced
            )
        self._ops.advance(
            row_ids, queries, self._drawn[:count], self._rows, self.sampled_ids[:count]
        )
        return ids, top

    def guess(self, row_ids: Tensor, position: Tensor, hidden: Tensor) -> Tensor:
        """Draws from the scores of a draft model's `hidden` [n, d], with each row's temperature and
        noise, and changes no row. row_ids, position: [n] of the queries after which the model would
        draw these tokens. Returns the tokens, [n] int32, which the next draw overwrites."""
        count = row_ids.shape[0]
        for first in range(0, count, self.slice_rows):
            part = slice(first, min(first + self.slice_rows, count))
            self._ops.sample_rows(
                self._model.draft_logits(hidden[part]),
                row_ids[part],
                position[part],
                self._rows,
                self._scratch,
                self._drawn[part],
                filters=False,
                adjusts=False,
                part=self._model.vocabulary,
            )
        return self._drawn[:count]

    def _slice(
        self,
        row_ids: Tensor,
        position: Tensor,
        hidden: Tensor,
        first: int,
        wants: int,
        most: int,
        told: tuple[Tensor, Tensor],
        asking: Asking,
        forced: Tensor | None,
    ) -> None:
        ops, rows, last = self._ops, self._rows, first + row_ids.shape[0]
        logits = self._model.logits(hidden)
        drawn, scratch, adjusts = self._drawn[first:last], self._scratch, bool(wants & WANTS_ADJUST)
        if adjusts:
            biases = self.bias_ids, self.bias_values
            part = self._model.vocabulary
            ops.adjust(
                logits,
                row_ids,
                position,
                rows,
                self._slot_token,
                *biases,
                self.masks,
                scratch,
                part,
            )
        out = (self.chosen[first:last], self.rank[first:last], *told)
        if self._ranks is not None:
            self._ranks.draw(logits, row_ids, position, drawn, adjusts, asking, forced, out)
            if wants & WANTS_LABELS:
                labels = self.chosen[first:last], *told
                label_logprobs(
                    logits, row_ids, rows, self.bias_ids, drawn, labels, self._model.vocabulary
                )
            return
        filters = bool(wants & WANTS_FILTER)
        ops.sample_rows(
            logits, row_ids, position, rows, scratch, drawn, filters=filters, adjusts=adjusts
        )
        say(forced, drawn)
        if wants & WANTS_LOGPROBS:
            ops.logprobs_rows(logits, row_ids, rows, drawn, most, scratch, out)
        if wants & WANTS_LABELS:
            label_logprobs(
                logits, row_ids, rows, self.bias_ids, drawn, (self.chosen[first:last], *told)
            )


def _longer(pool: Tensor, size: int) -> Tensor:
    out = torch.zeros(2 * size, dtype=pool.dtype, device=pool.device)
    out[: pool.shape[0]].copy_(pool)
    return out


PLAIN = 0
EVERY = WANTS_ANY & ~WANTS_LABELS  # label scores are only drawn by steps without a graph
# number of most likely tokens computed if any row wants logprobs; one number for all, since kernels
# are compiled for it
MOST = MAX_LOGPROBS
