"""Embedding: token ids to vectors. The head is a Linear; tied, it is made from the same table."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.ops import Ops
from penstock.layers.linear import Linear
from penstock.layers.norm import Norm
from penstock.parallel.layout import Layout
from penstock.parallel.sharded_weight import Weight
from penstock.quant.scheme import PLAIN, Made, Scheme, plain_product


@dataclass(slots=True)
class Embedding:
    """The table of a vocabulary."""

    table: Weight  # [vocabulary, d], of several ranks a stretch of it
    scale: float = 1.0
    first: int = 0  # the token of the first row
    summed: Layout | None = None  # whose ranks have a stretch each
    norm: Norm | None = None  # what rows pass

    def __call__(self, ops: Ops, ids: Tensor) -> Tensor:
        """ids `[T]` -> `[T, d]`, a tensor of its own that later layers may overwrite."""
        if self.summed is None:
            rows = ops.embed(ids, self.table.value, None)
        else:  # all but one rank add nothing
            rows = self.summed.all_reduce(ops.embed(ids, self.table.value, self.first))
        rows = rows if self.scale == 1.0 else rows.mul_(self.scale)
        return rows if self.norm is None else self.norm.alone(ops, rows)


class TiedHead(Linear):
    """The product that scores the vocabulary with the embedding's own table."""

    def __init__(self, embedding: Embedding, scheme: Scheme = PLAIN) -> None:
        super().__init__({"weight": embedding.table}, scheme=scheme)

    def prepare(self, ops: Ops) -> None:
        """The table stays as it is for embedding; where matrices are made at load, its numbers are
        made once more."""
        table = self.loaded["weight"].value
        scheme = self.scheme
        self.product = (
            scheme.made_of(ops, table) if isinstance(scheme, Made) else plain_product(ops, table)
        )
