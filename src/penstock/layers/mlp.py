"""Mlp: the feed-forward part of a layer. Gate and up are one product. T: tokens of a step, d:
hidden size, intermediate: numbers between the matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from penstock.kernels.fp8_rows import Rows
from penstock.kernels.ops import Ops
from penstock.layers.block import RoutedNumbers
from penstock.layers.linear import Linear
from penstock.parallel.sharded_weight import Weight

Activation = Literal["silu", "gelu_tanh"]


class FeedForward(Protocol):
    """The part after attention in a layer: an Mlp, or experts."""

    def __call__(self, ops: Ops, x: Rows) -> Tensor: ...

    @property
    def reader(self) -> Linear | None:
        """The one product that reads x; x is quantized as that product needs it. None: several
        products read x, which is not quantized."""

    def weights(self) -> Iterator[Weight]: ...

    def matrices(self) -> Iterator[Linear]:
        """Yields the matrices that every token is multiplied by."""

    def prepare(self, ops: Ops) -> None: ...

    @property
    def experts(self) -> RoutedNumbers | None:
        """Sizes of the experts; None: no experts."""


@dataclass(slots=True)
class Relu2Mlp:
    """Computes down(max(up(x), 0) squared), without a gate (arXiv:2109.08668; Nemotron-H). Shapes:
    d hidden size, intermediate inner size."""

    up: Linear  # [intermediate, d]
    down: Linear  # [d, intermediate]

    def __call__(self, ops: Ops, x: Rows) -> Tensor:
        """Returns the MLP's output [T, d] for T tokens x [T, d]."""
        made = self.up(ops, x)
        return self.down(ops, ops.relu2(made, self.down.form(made.shape[0])))

    @property
    def reader(self) -> Linear:
        return self.up

    def matrices(self) -> Iterator[Linear]:
        yield from (self.up, self.down)

    def weights(self) -> Iterator[Weight]:
        for matrix in self.matrices():
            yield from matrix.weights()

    def prepare(self, ops: Ops) -> None:
        for matrix in self.matrices():
            matrix.prepare(ops)

    @property
    def experts(self) -> None:
        """None: the MLP has no experts."""


@dataclass(slots=True)
class Mlp:
    """Computes down(act(gate(x)) * up(x)) (arXiv:2002.05202). Shapes: d hidden size, intermediate
    inner size."""

    gate_up: Linear  # [2 * intermediate, d]: gate's rows, then up's
    down: Linear  # [d, intermediate]
    activation: Activation = "silu"

    def __call__(self, ops: Ops, x: Rows) -> Tensor:
        """Returns the MLP's output [T, d] for T tokens x [T, d]."""
        middle: Rows | None = self.gate_up.gated(x, self.activation)
        if middle is None:
            gate_up = self.gate_up(ops, x)
            gate = ops.silu_mul if self.activation == "silu" else ops.gelu_mul
            middle = gate(gate_up, self.down.form(gate_up.shape[0]))
        return self.down(ops, middle)

    @property
    def reader(self) -> Linear:
        return self.gate_up

    def matrices(self) -> Iterator[Linear]:
        yield from (self.gate_up, self.down)

    def weights(self) -> Iterator[Weight]:
        yield from self.gate_up.weights()
        yield from self.down.weights()

    def prepare(self, ops: Ops) -> None:
        self.gate_up.prepare(ops)
        self.down.prepare(ops)

    @property
    def experts(self) -> None:
        """None: the MLP has no experts."""
