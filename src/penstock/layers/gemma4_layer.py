"""Gemma4Layer: a layer of Gemma 4. It has norms before and after each part, optional experts beside
the MLP, an optional per-layer input, and a scale of its output.

Shapes: T tokens, d hidden size, width numbers of the per-layer input. Source: transformers'
published code of Gemma 4; there is no report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import wide
from penstock.kernels.inputs import StepInputs
from penstock.kernels.ops import Ops
from penstock.layers.attention import Attention
from penstock.layers.block import Block, Keeper, RoutedNumbers
from penstock.layers.linear import Linear
from penstock.layers.mlp import Mlp
from penstock.layers.moe import Moe
from penstock.layers.norm import Norm
from penstock.layers.reading_attention import ReadingAttention
from penstock.parallel.sharded_weight import Weight


@dataclass(slots=True)
class RoutedBeside:
    """Experts that read the stream in parallel with the MLP; each output has its own norm."""

    behind_mlp: Norm
    before_router: Norm  # norm whose weight scales the router's input
    before: Norm
    moe: Moe
    behind: Norm

    def __call__(self, ops: Ops, made: Tensor | Callable[[], Tensor], stream: Tensor) -> Tensor:
        """Returns the sum of the normed MLP and expert outputs [T, d]. made: the MLP's output [T,
        d], or a function that returns it. stream: the MLP's input before its norm [T, d]."""
        scores = self.moe.router(ops, self.before_router.alone(ops, stream))
        routed = self.moe.answer(ops, self.before.alone(ops, stream), scores)
        routed = self.behind.alone(ops, routed)
        return self.behind_mlp.alone(ops, made() if callable(made) else made).add_(routed)

    def weights(self) -> Iterator[Weight]:
        for part in (self.behind_mlp, self.before_router, self.before, self.moe, self.behind):
            yield from part.weights()


@dataclass(slots=True)
class OwnInput:
    """Maps a token's per-layer input to the stream, through a gate computed from the stream."""

    gate: Linear  # [width, d]: from the stream to the gate
    out: Linear  # [d, width]: from the gated input to the stream
    norm: Norm

    def __call__(self, ops: Ops, stream: Tensor, given: Tensor) -> Tensor:
        """Returns the vectors [T, d] to add to the stream. stream: [T, d]. given: the per-layer
        input [T, width]."""
        opened = wide(ops.gelu_mul(torch.cat((self.gate(ops, stream), given), 1), "wide"))
        return self.norm.alone(ops, self.out(ops, opened))

    def matrices(self) -> tuple[Linear, Linear]:
        return self.gate, self.out

    def weights(self) -> Iterator[Weight]:
        for part in (*self.matrices(), self.norm):
            yield from part.weights()


@dataclass(slots=True)
class Gemma4Layer:
    """A layer of Gemma 4. A call returns the scaled sum of stream and output, and None as the
    residual."""

    number: int
    mixer_norm: Norm
    mixer: Attention | ReadingAttention
    mlp_norm: Norm  # norm before the MLP; its `first` is the norm after the mixer
    mlp: Mlp
    behind: Norm
    scale: Weight  # [1]: factor of the whole layer's output
    routed: RoutedBeside | None = None
    own: OwnInput | None = None

    def __call__(
        self, ops: Ops, x: Tensor, residual: Tensor | None, step: StepInputs, state: Sequence[Any]
    ) -> tuple[Tensor, None]:
        assert residual is None, "the layer before leaves the whole stream"
        rows, stream = self.mixer_norm(ops, x, None, self.mixer.reader)
        mixed = self.mixer(ops, rows, step, state[0])
        reader = self.mlp.reader if self.routed is None else None
        rows, stream = self.mlp_norm(ops, mixed, step.keep(stream), reader)
        if self.routed is None:
            made = self.mlp(ops, rows)
        elif self.mlp.down.is_summed:  # sums over ranks run one after another
            made = self.routed(ops, self.mlp(ops, rows), stream)
        else:
            made = self.routed(ops, ops.concurrent(lambda: self.mlp(ops, rows)), stream)
        stream = stream + self.behind.alone(ops, made)
        if self.own is not None:
            assert step.layer_inputs is not None, "the decoder makes them"
            stream.add_(self.own(ops, stream, step.keep(step.layer_inputs[:, self.number])))
        return stream.mul_(self.scale.value), None

    def keeps(self) -> Sequence[Keeper]:
        return (cast(Keeper, self.mixer),)

    def matrices(self) -> Iterator[Linear]:
        yield from self.mixer.matrices()
        yield from self.mlp.matrices()
        if self.own is not None:
            yield from self.own.matrices()

    def weights(self) -> Iterator[Weight]:
        for part in (
            self.mixer_norm,
            self.mlp_norm,
            self.behind,
            self.mixer,
            self.mlp,
            self.routed,
            self.own,
        ):
            if part is not None:
                yield from part.weights()
        yield self.scale

    def prepare(self, ops: Ops) -> Block:
        self.mixer.prepare(ops)
        self.mlp.prepare(ops)
        if self.routed is not None:
            self.routed.moe.prepare(ops)
        if self.own is not None:
            for matrix in self.own.matrices():
                matrix.prepare(ops)
        return cast(Block, self)

    @property
    def experts(self) -> RoutedNumbers | None:
        return None if self.routed is None else self.routed.moe.experts
