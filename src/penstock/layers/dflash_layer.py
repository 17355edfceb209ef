"""DFlashLayer: a DFlash drafter (arXiv:2602.06036), as the `speculators` package stores it. It
reads outputs of some of the model's layers and has a checkpoint of its own. T: tokens of a step, d:
hidden size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.inputs import StepInputs
from penstock.kernels.ops import Ops
from penstock.layers.attention import Attention
from penstock.layers.block import Block, Keeper
from penstock.layers.draft_head import DraftHead
from penstock.layers.linear import Linear
from penstock.layers.norm import Norm
from penstock.parallel.sharded_weight import Weight


@dataclass(slots=True)
class DFlashLayer:
    """A BlockLayer of several blocks. Each stores K and V of norm(join(outputs of the layers in
    `reads`)); only a draft's tokens go through the blocks. `store` multiplies by the queries' part
    of each product for nothing, so that a product stays one matrix."""

    reads: tuple[int, ...]
    join: Linear  # [d, len(reads) * d]
    joined_norm: Norm
    blocks: list[Block]
    attentions: tuple[Attention, ...]  # of the blocks
    norm: Norm
    head: DraftHead | None  # None: the model's
    mask: int

    of_model: bool = False
    embedding: None = None

    @property
    def has_head(self) -> bool:
        return self.head is not None

    def first(self, ops: Ops, hidden: Sequence[Tensor]) -> Tensor:
        return self.joined_norm.alone(ops, self.join(ops, torch.cat(tuple(hidden), -1)))

    def store(self, ops: Ops, hidden: Tensor, step: StepInputs, state: Sequence[Any]) -> None:
        for attention, kv in zip(self.attentions, state, strict=True):
            attention.store(ops, hidden, step, kv)

    def __call__(self, ops: Ops, embeds: Tensor, step: StepInputs, state: Sequence[Any]) -> Tensor:
        x, residual = embeds, None
        for block, kv in zip(self.blocks, state, strict=True):
            x, residual = block(ops, x, residual, step, (kv,))
        return self.norm.last(ops, x, residual)

    def scores(self, ops: Ops, hidden: Tensor) -> Tensor | None:
        return None if self.head is None else self.head(ops, hidden)

    def keeps(self) -> Sequence[Keeper]:
        return self.attentions

    def weights(self) -> Iterator[Weight]:
        for part in (self.join, self.joined_norm, self.norm):
            yield from part.weights()
        yield from chain.from_iterable(block.weights() for block in self.blocks)
        if self.head is not None:
            yield from self.head.weights()

    def prepare(self, ops: Ops) -> None:
        self.join.prepare(ops)
        self.blocks = [block.prepare(ops) for block in self.blocks]
        if self.head is not None:
            self.head.prepare(ops)
