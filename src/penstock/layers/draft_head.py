"""DraftHead: a drafter's head, over few of a model's tokens. D: tokens that it can draft, d:
hidden size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.ops import Ops
from penstock.layers.linear import Linear
from penstock.parallel.sharded_weight import Weight


@dataclass(slots=True)
class DraftHead:
    """A head of a drafter's own. vocabulary: number of the model's tokens. columns: tokens that
    this rank scores."""

    product: Linear  # [D, d]
    vocabulary: int
    columns: slice
    # [D] int64: the model's token of each draft token; None: the same, D equals vocabulary
    tokens: Tensor | None = None

    def __call__(self, ops: Ops, hidden: Tensor) -> Tensor:
        """Returns the scores [n, vocabulary] of hidden [n, d], or of this rank's tokens; those of
        tokens that it can't draft are the lowest finite number."""
        scores = self.product(ops, hidden)
        if self.tokens is not None:
            least = torch.finfo(scores.dtype).min
            every = scores.new_full((scores.shape[0], self.vocabulary), least)
            scores = every.index_copy_(1, self.tokens, scores)
        return scores[:, self.columns].contiguous()

    def weights(self) -> Iterator[Weight]:
        yield from self.product.weights()

    def prepare(self, ops: Ops) -> None:
        self.product.prepare(ops)
