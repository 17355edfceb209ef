"""A toy for tests: a layer that reads tags, beside a model's own. It knows layers, no rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.kernels.inputs import StepInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.ops import Ops
from penstock.models.decoder import Decoder

TAGS = 4


class TaggedBlock:
    """A block before which each token's embedding is moved by its tag's vector; tag 0 moves
    nothing."""

    def __init__(self, block: Any, moves: Tensor) -> None:
        self._block, self._moves = block, moves

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)

    def __call__(
        self, ops: Ops, x: Tensor, residual: Tensor | None, step: StepInputs, kv: LayerKv
    ) -> tuple[Tensor, Tensor]:
        assert residual is None and step.tags is not None and step.tags.shape[0] == x.shape[0]
        told: tuple[Tensor, Tensor] = self._block(
            ops, x + self._moves[step.tags.long()], residual, step, kv
        )
        return told


def moves_of(model: Decoder) -> Tensor:
    """Returns what each tag adds to an embedding: [TAGS, hidden]."""
    moves = torch.randn(
        (TAGS, model.config.hidden_size), generator=torch.Generator().manual_seed(5)
    )
    moves[0] = 0
    return moves.to(model.dtype)


def reads_tags(model: Decoder) -> None:
    """Has the first layer of a prepared model read tags, which are less than TAGS."""
    first: Any = TaggedBlock(model.blocks[0], moves_of(model))
    model.blocks[0], model.reads_tags = first, True
