"""RankSampler: draws tokens when ranks divide the vocabulary. Each rank has the logits of its part
of the vocabulary; all ranks get the same tokens.

    every row            the sampler's draw from this rank's part; ranks exchange 12 bytes per row
                         (its largest logit, then the winner's score and id)
    rows with filters    reference/sampling/rank_filters.py
    rows with logprobs   reference/sampling/logprobs.py

The host knows the rows with filters and logprobs, so nothing waits for the device; no graph holds
such draws. Knows rows, columns and the ranks' exchanges; no head, no plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.execute.staging_buffer import to_device
from penstock.kernels.inputs import VocabularyPart
from penstock.kernels.ops import RowOps
from penstock.kernels.reference.sampling.logprobs import rank_logprobs
from penstock.kernels.reference.sampling.rank_filters import filtered
from penstock.kernels.reference.sampling.sample import inputs_of
from penstock.kernels.row_state import RowState
from penstock.row_table import WANTS_ADJUST

Where = NDArray[np.int64]
_NONE: Where = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Asking:
    """Indices of the queries that have filters (top_k, top_p, min_p), and of those that want
    logprobs, in a step or a slice of it."""

    filters: Where
    logprobs: Where

    def within(self, first: int, last: int) -> Asking:
        """Returns the indices from `first` to `last`, counted from `first`."""
        return Asking(_inside(self.filters, first, last), _inside(self.logprobs, first, last))


def _inside(where: Where, first: int, last: int) -> Where:
    return where[(where >= first) & (where < last)] - first


NOBODY = Asking(_NONE, _NONE)


def say(forced: Tensor | None, drawn: Tensor) -> None:
    """Replaces drawn tokens [n] by forced ones [n] (-1: none), except for rows that are done or
    have non-finite logits (drawn < 0)."""
    if forced is not None:
        drawn.copy_(torch.where((forced >= 0) & (drawn >= 0), forced, drawn))


@dataclass(slots=True)
class RankSampler:
    """Draws tokens over all ranks. scratch: temporary memory of the sampling kernels, shared with
    `adjust`."""

    ops: RowOps
    rows: RowState
    scratch: Any
    part: VocabularyPart

    def draw(
        self,
        logits: Tensor,
        row_ids: Tensor,
        position: Tensor,
        drawn: Tensor,
        adjusts: bool,
        asking: Asking,
        forced: Tensor | None,
        out: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> None:
        """Draws n queries' tokens. logits [n, this rank's part of the vocabulary]; row_ids [n];
        position [n]. Writes the tokens to drawn [n], and logprobs of queries that want them to
        `out`: chosen [n], rank [n], ids [n, most], top [n, most]. forced: as in `say`."""
        self.ops.sample_rows(
            logits,
            row_ids,
            position,
            self.rows,
            self.scratch,
            drawn,
            filters=False,
            adjusts=adjusts,
            part=self.part,
        )
        if asking.filters.size:
            where = to_device(asking.filters, logits.device)
            inputs = inputs_of(
                row_ids[where], position[where], self.rows, any_filter=True, any_random=True
            )
            found = filtered(self._adjusted(logits, row_ids, where, adjusts), inputs, self.part)
            drawn[where] = torch.where(drawn[where] >= 0, found, drawn[where])
        say(forced, drawn)
        if asking.logprobs.size:
            where = to_device(asking.logprobs, logits.device)
            told = rank_logprobs(logits[where], drawn[where], out[2].shape[1], self.part)
            for column, values in zip(out, told, strict=True):
                column[where] = values

    def _adjusted(self, logits: Tensor, row_ids: Tensor, where: Tensor, adjusts: bool) -> Tensor:
        """Returns the float32 logits from which these rows draw."""
        raw = logits[where].to(torch.float32)
        if not adjusts:
            return raw
        asks = (self.rows.wants[row_ids[where].to(torch.int64)] & WANTS_ADJUST) != 0
        return torch.where(asks[:, None], self.scratch.adjusted[where], raw)
