"""EagleLayer: an EAGLE-3 drafter (arXiv:2503.01840), as the `speculators` package stores it. It
reads outputs of some of the model's layers and has a checkpoint of its own. T: tokens of a step, d:
hidden size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import wide
from penstock.kernels.inputs import StepInputs
from penstock.kernels.ops import Ops
from penstock.layers.attention import Attention
from penstock.layers.block import Keeper
from penstock.layers.draft_head import DraftHead
from penstock.layers.embedding import Embedding
from penstock.layers.linear import Linear
from penstock.layers.mlp import Mlp
from penstock.layers.norm import Norm
from penstock.parallel.sharded_weight import Weight


@dataclass(slots=True)
class EagleLayer:
    """A ChainLayer. First joins the outputs of the layers in `reads`; then attends to
    cat(norm(embedding of the next token), norm(hidden)), added to hidden; then an MLP.

    normed_residual: True adds to the normed hidden state instead. on_normed: True: a further
    prediction continues from the normed output, False: from the residual stream."""

    reads: tuple[int, ...]
    joined_norm: Norm | None  # norm of the joined outputs; None: no norm
    join: Linear  # [d, len(reads) * d]
    embedding_norm: Norm
    hidden_norm: Norm
    attention: Attention  # reads 2 d numbers, gives d
    mlp_norm: Norm
    mlp: Mlp
    norm: Norm
    head: DraftHead
    embedding: Embedding | None
    normed_residual: bool
    on_normed: bool

    of_model: bool = False
    has_head: bool = True

    def first(self, ops: Ops, hidden: Sequence[Tensor]) -> Tensor:
        x = torch.cat(tuple(hidden), -1)
        return self.join(ops, x if self.joined_norm is None else self.joined_norm.alone(ops, x))

    def __call__(
        self, ops: Ops, embeds: Tensor, hidden: Tensor, step: StepInputs, state: Sequence[Any]
    ) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm.alone(ops, hidden)
        both = torch.cat((self.embedding_norm.alone(ops, embeds), normed), -1)
        x = self.attention(ops, both, step, state[0])
        residual = normed if self.normed_residual else hidden
        rows, residual = self.mlp_norm(ops, x, residual, self.mlp.reader)
        rows, stream = self.norm(ops, self.mlp(ops, rows), residual, None)
        output = wide(rows)
        return output, output if self.on_normed else stream

    def scores(self, ops: Ops, hidden: Tensor) -> Tensor:
        return self.head(ops, hidden)

    def keeps(self) -> Sequence[Keeper]:
        return (self.attention,)

    def weights(self) -> Iterator[Weight]:
        norms = (self.joined_norm, self.embedding_norm, self.hidden_norm, self.mlp_norm, self.norm)
        yield from chain.from_iterable(norm.weights() for norm in norms if norm is not None)
        for part in (self.join, self.attention, self.mlp, self.head):
            yield from part.weights()
        if self.embedding is not None:
            yield self.embedding.table

    def prepare(self, ops: Ops) -> None:
        for part in (self.join, self.attention, self.mlp, self.head):
            part.prepare(ops)
