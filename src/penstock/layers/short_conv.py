"""ShortConv: a gated convolution over a few tokens (LFM2). It replaces attention in some layers. T:
tokens of a step, S: those whose output is needed, d: hidden size."""

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

# name of the state array [width, numbers]: a sequence's last inputs, position p at index p % width
WINDOW = "window"


@dataclass(slots=True)
class ShortConv:
    """Computes out(gate * conv(gate' * value)). One product gives both gates and the value. The
    convolution is causal and goes over each channel separately. Shapes: d hidden size; taps: tokens
    that the convolution sees."""

    name: str  # prefix of its tensors' names in a checkpoint, before `.in_proj`
    form: StateForm
    into: Linear  # [3 * channels, d]: gate', gate, value
    taps: Weight  # [channels, 1, taps]: weights of the convolution
    bias: Weight | None  # [channels]: bias of the convolution
    out: Linear  # [d, channels]: output projection

    kind: None = None  # None: the layer is not attention
    cos_sin: None = None
    source: None = None

    def __call__(self, ops: Ops, x: Rows, step: StepInputs, state: dict[str, Tensor]) -> Tensor:
        """Returns [S, d] for the S tokens of the step whose output is needed. x: [T, d]. state: the
        layer's named arrays, updated in place."""
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
