"""Sampler: hidden states -> one token a row, in slices of rows, so that logits never exist whole.

It knows the head, the operations on logits and what rows ask for; no sequences, no text. Rows that ask for nothing
but a temperature pay for nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.execute.asked import Asked
from penstock.execute.batch import Batch
from penstock.execute.device_rows import DeviceRows, to_device
from penstock.kernels.inputs import SamplerInputs
from penstock.kernels.ops import Ops
from penstock.models.decoder import Decoder
from penstock.row_table import WANTS_BIAS, WANTS_FILTER, WANTS_LOGPROBS, WANTS_MIN_TOKENS, WANTS_PENALTY
from penstock.schedule.step import Chunks, Int32, Int64, StepPlan

MAX_SLICE = 1024  # rows of logits at once
_ADJUSTS = WANTS_PENALTY | WANTS_BIAS | WANTS_MIN_TOKENS


@dataclass(slots=True)
class Logprobs:
    """Logprobs of m tokens, still on the device; `where` and each token's own k are the host's."""

    where: Int64  # [m]
    k: Int32  # [m]
    chosen: Tensor  # [m] float32
    rank: Tensor  # [m] int32
    top_ids: Tensor  # [m, max k] int32
    top: Tensor  # [m, max k] float32
    place: Int64 | None = None  # the tensors have more lines, and these are the m; None: all, in order


class Sampler:
    """slice_logits: how many logits may exist at once, about; at least 16 rows of them."""

    def __init__(self, model: Decoder, ops: Ops, rows: DeviceRows, slot_token: Tensor, slice_logits: int) -> None:
        self._model = model
        self._ops = ops
        self._rows = rows
        self._slot_token = slot_token
        in_bounds = slice_logits // model.config.vocab_size
        self.slice_rows = max(16, min(MAX_SLICE, in_bounds) // 16 * 16)

    def draw(self, hidden: Tensor, plan: StepPlan, batch: Batch, asked: Asked) -> tuple[Tensor, Logprobs | None]:
        """hidden [S, d] of the decode rows -> tokens [S] int32 (or BAD_LOGITS), logprobs of those that ask."""
        tokens, logprobs = [], []
        for first in range(0, plan.rows.size, self.slice_rows):
            part = slice(first, min(first + self.slice_rows, plan.rows.size))
            host_rows = plan.rows[part]
            wants = asked.wants[host_rows] if plan.wants else None
            raw = self._model.logits(hidden[part])
            logits = raw if wants is None else self._adjusted(raw, part, wants, host_rows, batch, asked)
            tokens.append(self._ops.sample(logits, self._inputs(part, batch, plan.wants, asked.random[host_rows])))
            if wants is not None and plan.wants & WANTS_LOGPROBS:
                where = np.flatnonzero(wants & WANTS_LOGPROBS)
                k = asked.logprobs[host_rows[where]]
                logprobs.append(self._logprobs(raw, where, tokens[-1], k, first))
        return torch.cat(tokens), _joined(logprobs)

    def prompt_logprobs(self, hidden: Tensor, chunks: Chunks) -> Logprobs | None:
        """hidden [tokens, d] of the chunks -> for each token whose chunk asks, what it gave the prompt's next token."""
        k = np.repeat(chunks.prompt_logprobs, np.diff(chunks.start))
        where = np.flatnonzero((k >= 0) & (chunks.next_token >= 0))
        parts = []
        for first in range(0, where.size, self.slice_rows):
            some = where[first : first + self.slice_rows]
            place = to_device(some, hidden.device)
            targets = to_device(chunks.next_token[some], hidden.device)
            logits = self._model.logits(hidden.index_select(0, place))
            found = self._ops.token_logprobs(logits, targets, int(k[some].max()))
            parts.append(Logprobs(some, k[some], *found))
        return _joined(parts)

    def _inputs(self, part: slice, batch: Batch, wants: int, random: np.ndarray) -> SamplerInputs:
        rows, columns = batch.rows[part], self._rows
        return SamplerInputs(
            temperature=columns.temperature[rows],
            top_p=columns.top_p[rows],
            top_k=columns.top_k[rows],
            min_p=columns.min_p[rows],
            seed=columns.seed[rows],
            sample=columns.sample[rows],
            position=batch.length[part] + 1,
            any_filter=bool(wants & WANTS_FILTER),
            any_random=bool(random.any()),
        )

    def _logprobs(self, raw: Tensor, where: Int64, tokens: Tensor, k: Int32, first: int) -> Logprobs:
        if where.size == raw.shape[0]:
            found = self._ops.token_logprobs(raw, tokens, int(k.max()))
        else:
            place = to_device(where, raw.device)
            found = self._ops.token_logprobs(raw.index_select(0, place), tokens[place], int(k.max(initial=0)))
        return Logprobs(where + first, k, *found)

    def _adjusted(
        self, raw: Tensor, part: slice, wants: np.ndarray, host_rows: Int32, batch: Batch, asked: Asked
    ) -> Tensor:
        """The slice's logits with bias, penalties and bars of rows that ask: a float32 copy, or raw if nobody does."""
        if not (wants & _ADJUSTS).any():
            return raw
        logits = raw.to(torch.float32, copy=True)
        if (wants & WANTS_BIAS).any():
            bias = asked.bias(host_rows)
            send = (to_device(column, raw.device) for column in (bias.where, bias.ids, bias.values))
            self._ops.apply_bias(logits, *send)
        if (wants & WANTS_PENALTY).any():
            self._penalize(logits, np.flatnonzero(wants & WANTS_PENALTY), part, batch)
        if (wants & WANTS_MIN_TOKENS).any():
            self._bar(logits, np.flatnonzero(wants & WANTS_MIN_TOKENS), part, batch)
        return logits

    def _penalize(self, logits: Tensor, where: Int64, part: slice, batch: Batch) -> None:
        place = to_device(where, logits.device)
        rows, columns = batch.rows[part][place], self._rows
        width = -(-batch.max_length // BLOCK_SIZE)
        self._ops.apply_penalties(
            logits,
            place,
            self._slot_token,
            columns.block_table[:, :width].index_select(0, rows),
            batch.length[part][place] + 1,
            columns.prompt_length[rows],
            columns.repetition[rows],
            columns.presence[rows],
            columns.frequency[rows],
        )

    def _bar(self, logits: Tensor, where: Int64, part: slice, batch: Batch) -> None:
        place = to_device(where, logits.device)
        rows, columns = batch.rows[part][place], self._rows
        ends = columns.end_ids.expand(place.shape[0], -1)
        ids = torch.cat((ends, columns.stop_ids[rows].to(torch.int64)), dim=1)
        too_early = batch.length[part][place] + 1 < columns.min_length[rows]
        self._ops.bar_ids(logits, place, ids, too_early)


def _joined(parts: list[Logprobs]) -> Logprobs | None:
    """Slices' logprobs as one, padded to the widest k with id -1 and -inf."""
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0]
    width = max(part.top.shape[1] for part in parts)

    def padded(x: Tensor, fill: float) -> Tensor:
        return torch.nn.functional.pad(x, (0, width - x.shape[1]), value=fill)

    return Logprobs(
        np.concatenate([p.where for p in parts]),
        np.concatenate([p.k for p in parts]),
        torch.cat([p.chosen for p in parts]),
        torch.cat([p.rank for p in parts]),
        torch.cat([padded(p.top_ids, -1) for p in parts]),
        torch.cat([padded(p.top, -torch.inf) for p in parts]),
    )
