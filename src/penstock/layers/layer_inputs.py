"""LayerInputs: an input of each layer per token, beside the stream (Gemma 3n's and 4's per-layer
embeddings).

The input is the sum of a table row, which has a part for each layer, and a product of the token's
embedding; it is computed once a step, before all layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.ops import Ops
from penstock.layers.embedding import Embedding
from penstock.layers.linear import Linear
from penstock.layers.norm import Norm
from penstock.parallel.sharded_weight import Weight

HALVES = 2.0**-0.5  # factor that gives a sum of two numbers of variance 1 the variance 1


@dataclass(slots=True)
class LayerInputs:
    """A table and a product, normed for each layer."""

    table: Embedding  # [vocabulary, layers * width], rows scaled
    product: Linear  # [layers * width, d]
    scale: float  # factor of the product
    norm: Norm  # [width]

    def __call__(self, ops: Ops, ids: Tensor, embedded: Tensor) -> Tensor:
        """Returns [T, layers, width]. ids: [T]. embedded: the tokens' embeddings in the stream [T,
        d]."""
        width = self.norm.weight.shape[0]
        made = self.product(ops, embedded).mul_(self.scale).view(-1, width)
        normed = self.norm.alone(ops, made).view(ids.shape[0], -1, width)
        return normed.add_(self.table(ops, ids).view_as(normed)).mul_(HALVES)

    def weights(self) -> Iterator[Weight]:
        yield self.table.table
        yield from self.product.weights()
        yield from self.norm.weights()

    def prepare(self, ops: Ops) -> None:
        self.product.prepare(ops)
