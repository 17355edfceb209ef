"""LayerInputs: per-layer embeddings (Gemma 3n and 4). Each layer gets a vector for each token,
besides the residual stream.

The vector is the sum of a row of a table, which has a part for each layer, and a linear map of the
token's embedding. All layers' vectors are computed once a step, before the first layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.ops import Ops
from penstock.layers.embedding import Embedding
from penstock.layers.linear import Linear
from penstock.layers.norm import Norm
from penstock.parallel.sharded_weight import Weight

HALVES = 2.0**-0.5  # factor of the sum of two numbers of variance 1, so that its variance is 1


@dataclass(slots=True)
class LayerInputs:
    """The table, and the linear map with its norm. Shapes: T tokens, d hidden size, width numbers
    per layer and token."""

    table: Embedding  # [vocabulary, layers * width]: each token's inputs of all layers, scaled
    product: Linear  # [layers * width, d]: makes inputs of all layers from an embedding
    scale: float  # factor of the product's result
    norm: Norm  # [width]: norm of the scaled result, layer by layer

    def __call__(self, ops: Ops, ids: Tensor, embedded: Tensor) -> Tensor:
        """Returns each layer's input, [T, layers, width]. ids: token ids [T]. embedded: the tokens'
        embeddings [T, d]."""
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
