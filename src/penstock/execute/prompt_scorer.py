"""PromptScorer: computes the logprobs of prompt tokens. It works in slices, so that the logits of a
whole prompt are never in memory.

Knows the head and chunks; no rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.execute.staging_buffer import to_device
from penstock.kernels.ops import Ops
from penstock.kernels.reference.sampling.logprobs import rank_logprobs
from penstock.models.decoder import Decoder
from penstock.schedule.step import Chunks, Int32, Int64


@dataclass(slots=True)
class Logprobs:
    """Logprobs of m tokens on the device; `where` and `k` are on the host. where: indices of the
    tokens. k: number of most likely tokens wanted by each."""

    where: Int64  # [m]: index of the token in the step
    k: Int32  # [m]: number of most likely tokens wanted there
    chosen: Tensor  # [m] float32: logprob of the token itself
    rank: Tensor  # [m] int32: rank of the token itself, from 1
    top_ids: Tensor  # [m, max k] int32: ids of the most likely tokens
    top: Tensor  # [m, max k] float32: logprobs of the most likely tokens
    place: Int64 | None = (
        # [m]: rows of the tensors that belong to these tokens; None: all rows, in order
        None
    )


class PromptScorer:
    """Scores prompt tokens. slice_rows: rows of logits in memory at once."""

    def __init__(self, model: Decoder, ops: Ops, slice_rows: int) -> None:
        self._model, self._ops, self.slice_rows = model, ops, slice_rows

    def score(self, hidden: Tensor, chunks: Chunks) -> Logprobs | None:
        """Returns the logprobs of the prompt's next token, for each token whose chunk wants
        prompt_logprobs; None if none does. hidden: the chunks' hidden states [tokens, model width].
        """
        k = np.repeat(chunks.prompt_logprobs, np.diff(chunks.start))
        where = np.flatnonzero((k >= 0) & (chunks.next_token >= 0))
        parts = []
        for first in range(0, where.size, self.slice_rows):
            some = where[first : first + self.slice_rows]
            place = to_device(some, hidden.device)
            targets = to_device(chunks.next_token[some], hidden.device)
            logits = self._model.logits(hidden.index_select(0, place))
            part, most = self._model.vocabulary, int(k[some].max())
            if part is None:
                found = self._ops.token_logprobs(logits, targets, most)
            else:
                found = rank_logprobs(logits, targets, most, part)
            parts.append(Logprobs(some, k[some], *found))
        return _joined(parts)


def _joined(parts: list[Logprobs]) -> Logprobs | None:
    """Joins the logprobs of slices, padded to the widest k with id -1 and -inf."""
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
