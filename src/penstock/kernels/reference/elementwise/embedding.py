"""Embedding in plain torch: looks up rows of the table."""

from __future__ import annotations

import torch
from torch import Tensor


def embed(ids: Tensor, table: Tensor, first: int | None = None) -> Tensor:
    """Returns rows [T, d] of table [rows, d] for ids [T] of any integer dtype. first: token id of
    the table's first row, if the table has a range of the vocabulary; tokens outside it give 0.
    None: the table has the whole vocabulary, and may be in host memory."""
    if first is None:
        return table.index_select(0, ids.to(table.device)).to(ids.device)
    row = ids - first
    inside = (row >= 0) & (row < table.shape[0])
    return table.index_select(0, torch.where(inside, row, 0)).masked_fill_(~inside[:, None], 0)
