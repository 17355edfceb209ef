"""Token ids to rows of the embedding table."""

from __future__ import annotations

import torch
from torch import Tensor


def embed(ids: Tensor, table: Tensor, first: int | None = None) -> Tensor:
    """ids [T] of any integer dtype, table [rows, d] -> [T, d]. first: the token of the table's
    first row, where it is a stretch of the vocabulary; the tokens of others are 0. None: it has
    them all, and may lie in the host's memory."""
    if first is None:
        return table.index_select(0, ids.to(table.device)).to(ids.device)
    row = ids - first
    inside = (row >= 0) & (row < table.shape[0])
    return table.index_select(0, torch.where(inside, row, 0)).masked_fill_(~inside[:, None], 0)
