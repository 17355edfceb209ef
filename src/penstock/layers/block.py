"""Block: what a decoder is a list of. Attention and MLP are blocks, and so is a layer made of them.

A block knows its weights: loading, cutting, counting and preparing are loops over what it names, and whoever adds a
block to a model changes nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from penstock.kernels.inputs import StepInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.ops import Ops
from penstock.layers.attention import Attention
from penstock.quant.weight import Weight


class Block(Protocol):
    """x [T, d], residual [T, d] (None: x opens the stream) -> the block's answer [T, d] and the next residual, both of
    the tokens that the step keeps."""

    @property
    def attention(self) -> Attention:
        """Its attention: whose kind is planned for, and for which KV is kept."""

    def __call__(
        self, ops: Ops, x: Tensor, residual: Tensor | None, step: StepInputs, kv: LayerKv
    ) -> tuple[Tensor, Tensor]: ...

    def weights(self) -> Iterator[Weight]:
        """Yields every weight, always in the same order."""

    def prepare(self, ops: Ops) -> Block:
        """Arranges the loaded weights for their kernels, once -> what takes this block's place: itself, or a form of it
        that is faster with these operations."""

    @property
    def numbers(self) -> int | None:
        """Numbers of the matrices that a token is multiplied by; None: not the same ones for each token (experts)."""
