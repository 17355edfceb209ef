"""Embedding: token ids to vectors. The head is a Linear; a tied head is made from the
same table."""

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
    """The table that maps token ids to vectors of d numbers. T: tokens of a step."""

    table: Weight  # [vocabulary, d], or this rank's range of rows
    scale: float = 1.0
    first: int = 0  # token id of this rank's first row
    # the ranks, if each holds a range of the rows; None: this rank holds all rows
    summed: Layout | None = None
    norm: Norm | None = None  # norm of the vectors that are looked up; None: no norm

    def __call__(self, ops: Ops, ids: Tensor) -> Tensor:
        """Returns [T, d] for ids [T]: a new tensor that later layers may overwrite."""
        if self.summed is None:
            rows = ops.embed(ids, self.table.value, None)
        else:  # a token's row is on one rank; the other ranks contribute zeros to the sum
            rows = self.summed.all_reduce(ops.embed(ids, self.table.value, self.first))
        rows = rows if self.scale == 1.0 else rows.mul_(self.scale)
        return rows if self.norm is None else self.norm.alone(ops, rows)


class TiedHead(Linear):
    """The model's head when it multiplies by the embedding's table."""

    def __init__(self, embedding: Embedding, scheme: Scheme = PLAIN) -> None:
        super().__init__({"weight": embedding.table}, scheme=scheme)

    def prepare(self, ops: Ops) -> None:
        """Prepares the product with the embedding's table, which stays in place. With quantization
        at load, the product uses a quantized copy."""
        table = self.loaded["weight"].value
        scheme = self.scheme
        self.product = (
            scheme.made_of(ops, table) if isinstance(scheme, Made) else plain_product(ops, table)
        )
