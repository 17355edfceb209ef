"""Gemma4Layer: a layer of Gemma 4. It has norms before and after each part, optional experts beside
the MLP, an optional per-layer input, and a scale of its output.

Shapes: T tokens, d hidden size, width numbers of the per-layer input. Source: transformers'
published code of Gemma 4; there is no report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    def __call__(self, ops: Ops, inputs: Sequence[Tensor]) -> Tensor:
        """Returns the experts' output [T, d] before its norm. inputs: of the router and of the
        experts, [T, d] each."""
        return self.moe.answer(ops, inputs[1], self.moe.router(ops, inputs[0]))

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
        """Returns the vectors [T, d] whose norm is added to the stream. stream: [T, d]. given: the
        per-layer input [T, width]."""
        opened = wide(ops.gelu_mul(torch.cat((self.gate(ops, stream), given), 1), "wide"))
        return self.out(ops, opened)

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
        scale, eps, behind = self.scale.value, self.behind.eps, self.behind.weight.value
        last = scale if self.own is None else None
        if self.routed is not None:
            stream = self._beside(ops, self.routed, mixed, step.keep(stream), last)
        else:
            rows, stream = self.mlp_norm(ops, mixed, step.keep(stream), self.mlp.reader)
            stream = ops.add_normed(stream, ((self.mlp(ops, rows), behind),), None, eps, last)
        if self.own is not None:
            assert step.layer_inputs is not None, "the decoder makes them"
            made = self.own(ops, stream, step.keep(step.layer_inputs[:, self.number]))
            part = made, self.own.norm.weight.value
            stream = ops.add_normed(stream, (part,), None, eps, scale)
        return stream, None

    def _beside(
        self, ops: Ops, routed: RoutedBeside, mixed: Tensor, stream: Tensor, last: Tensor | None
    ) -> Tensor:
        """Returns the sum of stream [T, d] and the output of MLP and experts, times last [1]
        (None: 1). mixed: the mixer's output [T, d]."""
        norms = (self.mlp_norm, routed.before_router, routed.before)
        assert self.mlp_norm.first is not None, "the mixer's output is normed"
        (rows, *inputs), stream = ops.add_rms_norms(
            mixed,
            stream,
            self.mlp_norm.first.weight.value,
            tuple(norm.weight.value for norm in norms),
            self.mlp_norm.eps,
        )
        if self.mlp.down.is_summed:  # sums over ranks run one after another
            made = self.mlp(ops, rows)
            found = routed(ops, inputs)
        else:
            found, made = ops.concurrent(
                lambda met: routed(ops, inputs), lambda: self.mlp(ops, rows)
            )
        parts = (made, routed.behind_mlp.weight.value), (found, routed.behind.weight.value)
        return ops.add_normed(stream, parts, self.behind.weight.value, self.behind.eps, last)

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
