"""Token ids to rows of the embedding table."""

from __future__ import annotations

from torch import Tensor


def embed(ids: Tensor, table: Tensor) -> Tensor:
    """ids [T] of any integer dtype, table [vocabulary, d] -> [T, d]."""
    return table.index_select(0, ids)
