"""ShortConv: a gated convolution over each channel's last few tokens, in place of
attention (LFM2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.fp8_rows import Rows
from penstock.kernels.inputs import StepInputs
from penstock.kernels.ops import Ops
from penstock.kernels.state_forms import StateForm
from penstock.layers.linear import Linear
from penstock.parallel.sharded_weight import Weight

# name of the state [taps, channels]: the last inputs, position p at p % taps
WINDOW = "window"


@dataclass(slots=True)
class ShortConv:
    """Computes out(gate * conv(gate' * value)) from one product of all three; the convolution is
    causal and per channel."""

    name: str  # name in a checkpoint, before `.in_proj`
    form: StateForm
    into: Linear  # [3 * channels, d]: gate' of the values, gate of the output, values
    taps: Weight  # [channels, 1, taps]
    bias: Weight | None  # [channels]
    out: Linear  # [d, channels]

    kind: None = None  # no attention
    cos_sin: None = None
    source: None = None

    def __call__(self, ops: Ops, x: Rows, step: StepInputs, state: dict[str, Tensor]) -> Tensor:
        """Returns [T, d], or [S, d] for the tokens that the step keeps. x: [T, d]."""
        bias = None if self.bias is None else self.bias.value
        mixed = ops.short_conv(
            self.into(ops, x), self.taps.value.squeeze(1), bias, state[WINDOW], step
        )
        return self.out(ops, step.keep(mixed))

    @property
    def reader(self) -> Linear:
        return self.into

    def weights(self) -> Iterator[Weight]:
        yield self.taps
        if self.bias is not None:
            yield self.bias
        yield from self.into.weights()
        yield from self.out.weights()

    def matrices(self) -> Iterator[Linear]:
        yield from (self.into, self.out)

    def prepare(self, ops: Ops) -> None:
        self.into.prepare(ops)
        self.out.prepare(ops)
