"""Embedding: token ids to vectors. The head is a Linear; tied, it is made from the same table."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.ops import Ops
from penstock.layers.linear import Linear


@dataclass(slots=True)
class Embedding:
    """The table of a vocabulary."""

    table: Tensor  # [vocabulary, d]

    def __call__(self, ops: Ops, ids: Tensor) -> Tensor:
        """ids `[T]` -> `[T, d]`, a tensor of its own that later layers may overwrite."""
        return ops.embed(ids, self.table)

    def tied_head(self) -> Linear:
        """The product that scores the vocabulary with this same table."""
        return Linear(self.table, None)
