"""Decoder layers: blocks of mixer and feed-forward part. A mixer is attention, a convolution or a
recurrence. The classes differ in the order of norms around the parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from penstock.kernels.fp8_rows import wide
from penstock.kernels.inputs import StepInputs
from penstock.kernels.ops import Ops
from penstock.layers.attention import Attention
from penstock.layers.block import Block, Keeper, Mixer, RoutedNumbers
from penstock.layers.linear import Linear
from penstock.layers.mlp import FeedForward, Mlp
from penstock.layers.norm import Norm
from penstock.layers.one_row import OneRowLayer, fits_gate, fits_qkv
from penstock.parallel.sharded_weight import Weight


class _TwoParts:
    """Base class of layers with a mixer and a feed-forward part."""

    __slots__ = ()
    mixer: Mixer
    mlp: FeedForward

    def prepare(self, ops: Ops) -> Block:
        self.mixer.prepare(ops)
        self.mlp.prepare(ops)
        return cast(Block, self)

    def keeps(self) -> Sequence[Keeper]:
        return (self.mixer,)

    def matrices(self) -> Iterator[Linear]:
        yield from self.mixer.matrices()
        yield from self.mlp.matrices()

    @property
    def experts(self) -> RoutedNumbers | None:
        return self.mlp.experts


@dataclass(slots=True)
class DecoderLayer(_TwoParts):
    """A layer in Llama's order: a norm before each part. scale: factor of each part's output. Gemma
    also norms each output before it is added to the stream. That norm is computed together with the
    following norm, as its `Norm.first`; the following norm may belong to the next layer."""

    mixer_norm: Norm
    mixer: Mixer
    mlp_norm: Norm
    mlp: FeedForward
    scale: float = 1.0

    def __call__(
        self, ops: Ops, x: Tensor, residual: Tensor | None, step: StepInputs, state: Sequence[Any]
    ) -> tuple[Tensor, Tensor]:
        rows, residual = self.mixer_norm(ops, x, residual, self.mixer.reader)
        x = self._scaled(self.mixer(ops, rows, step, state[0]))
        rows, residual = self.mlp_norm(ops, x, step.keep(residual), self.mlp.reader)
        return self._scaled(self.mlp(ops, rows)), residual

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1.0 else x.mul_(self.scale)

    def weights(self) -> Iterator[Weight]:
        yield from self.mixer_norm.weights()
        yield from self.mlp_norm.weights()
        yield from self.mixer.weights()
        yield from self.mlp.weights()

    def prepare(self, ops: Ops) -> Block:
        _TwoParts.prepare(self, ops)
        if (
            ops.one_row is None
            or not isinstance(self.mixer, Attention)
            or self.scale != 1.0
            or self.mlp_norm.first is not None
            or self.mlp_norm.centred
            or not isinstance(self.mlp, Mlp)
            or not fits_gate(self.mlp)
        ):
            return self
        plain = fits_qkv(self.mixer)
        return OneRowLayer(
            self, ops.one_row, self.mixer_norm, self.mixer, self.mlp_norm, self.mlp, plain
        )


@dataclass(slots=True)
class MixerLayer:
    """A layer of a norm and a mixer, without a feed-forward part (Nemotron-H, arXiv:2504.03624)."""

    norm: Norm
    mixer: Mixer

    def __call__(
        self, ops: Ops, x: Tensor, residual: Tensor | None, step: StepInputs, state: Sequence[Any]
    ) -> tuple[Tensor, Tensor]:
        rows, residual = self.norm(ops, x, residual, self.mixer.reader)
        return self.mixer(ops, rows, step, state[0]), step.keep(residual)

    def keeps(self) -> Sequence[Keeper]:
        return (self.mixer,)

    def matrices(self) -> Iterator[Linear]:
        yield from self.mixer.matrices()

    def weights(self) -> Iterator[Weight]:
        yield from self.norm.weights()
        yield from self.mixer.weights()

    def prepare(self, ops: Ops) -> Block:
        self.mixer.prepare(ops)
        return cast(Block, self)

    @property
    def experts(self) -> None:
        """None: the layer has no experts."""


@dataclass(slots=True)
class FeedForwardLayer:
    """A layer of a norm and a feed-forward part, without a mixer; it keeps no state."""

    norm: Norm
    mlp: FeedForward

    def __call__(
        self, ops: Ops, x: Tensor, residual: Tensor | None, step: StepInputs, state: Sequence[Any]
    ) -> tuple[Tensor, Tensor]:
        residual = None if residual is None else step.keep(residual)
        rows, residual = self.norm(ops, step.keep(x), residual, self.mlp.reader)
        return self.mlp(ops, rows), residual

    def keeps(self) -> Sequence[Keeper]:
        return ()

    def matrices(self) -> Iterator[Linear]:
        yield from self.mlp.matrices()

    def weights(self) -> Iterator[Weight]:
        yield from self.norm.weights()
        yield from self.mlp.weights()

    def prepare(self, ops: Ops) -> Block:
        self.mlp.prepare(ops)
        return cast(Block, self)

    @property
    def experts(self) -> RoutedNumbers | None:
        return self.mlp.experts


@dataclass(slots=True)
class NormsBehindLayer(_TwoParts):
    """A layer in OLMo 2's order (arXiv:2501.00656): each part reads the stream without a norm, and
    its output is normed."""

    mixer: Mixer
    behind_mixer: Norm
    mlp: FeedForward
    behind_mlp: Norm

    def __call__(
        self, ops: Ops, x: Tensor, residual: Tensor | None, step: StepInputs, state: Sequence[Any]
    ) -> tuple[Tensor, Tensor]:
        stream = x if residual is None else residual.add_(x)
        x = self.behind_mixer.alone(ops, self.mixer(ops, stream, step, state[0]))
        stream = step.keep(stream).add_(x)
        return self.behind_mlp.alone(ops, self.mlp(ops, stream)), stream

    def weights(self) -> Iterator[Weight]:
        yield from (self.behind_mixer.weight, self.behind_mlp.weight)
        yield from self.mixer.weights()
        yield from self.mlp.weights()


@dataclass(slots=True)
class ParallelLayer(_TwoParts):
    """A layer in Command R's order, first used by GPT-J: both parts read the same norm of the
    stream, and both outputs are added to the stream."""

    norm: Norm
    mixer: Mixer
    mlp: FeedForward

    def __call__(
        self, ops: Ops, x: Tensor, residual: Tensor | None, step: StepInputs, state: Sequence[Any]
    ) -> tuple[Tensor, Tensor]:
        rows, residual = self.norm(ops, x, residual, None)
        mixed = self.mixer(ops, rows, step, state[0])
        return mixed.add_(self.mlp(ops, step.keep(wide(rows)))), step.keep(residual)

    def weights(self) -> Iterator[Weight]:
        yield from self.norm.weights()
        yield from self.mixer.weights()
        yield from self.mlp.weights()
