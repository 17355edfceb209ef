"""GatedDeltaNet: linear attention by the gated delta rule (arXiv:2412.06464). Its state is a matrix
per head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.kernels.delta_rule import DeltaHeads, DeltaWeights
from penstock.kernels.fp8_rows import Rows
from penstock.kernels.inputs import StepInputs
from penstock.kernels.ops import Ops
from penstock.kernels.state_forms import StateForm
from penstock.layers.linear import Linear
from penstock.layers.short_conv import WINDOW
from penstock.parallel.sharded_weight import Weight

MATRIX = "matrix"  # name of the array of state matrices: [value_heads, key_width, value_width]


@dataclass(slots=True)
class GatedDeltaNet:
    """Computes out(norm(rule(conv(q, k, v), rates)) * silu(z)). One product gives q, k, v and z,
    another the rates. Shapes: d hidden size; channels: q, k and v together; value_size: numbers of
    v; taps: tokens that the convolution sees. kernels/delta_rule.py has the formulas."""

    name: str  # prefix of its tensors' names in a checkpoint, before `.out_proj`
    form: StateForm
    heads: DeltaHeads
    into: Linear  # [channels + value_size, d]: q, k, v, z
    rates: Linear  # [2 * value_heads, d]: b, then a, of each head
    taps: Weight  # [channels, 1, taps]: weights of the convolution
    decay: Weight  # [value_heads] float32: the checkpoint's A_log
    step_bias: Weight  # [value_heads] float32: the checkpoint's dt_bias
    norm: Weight  # [value_width]: weight of the norm of each head's output
    eps: float
    out: Linear  # [d, value_size]: output projection
    most_rate: float = 1.0  # upper end of the range of b
    # True: the checkpoint stores the rows of `into` and `rates` key head by key head
    in_groups: bool = False
    small: DeltaWeights | None = field(default=None, init=False)

    kind: None = None  # None: the layer is not attention
    cos_sin: None = None
    source: None = None
    reader: None = None  # None: two products, `into` and `rates`, read x

    def __call__(self, ops: Ops, x: Rows, step: StepInputs, state: dict[str, Tensor]) -> Tensor:
        """Returns [S, d] for the S tokens of the step whose output is needed. x: [T, d], T tokens.
        state: the layer's named arrays, updated in place."""
        assert self.small is not None, "a layer is prepared before it is used"
        given, rates = self.into(ops, x), self.rates(ops, x)
        mixed = ops.delta_rule(
            given, rates, self.heads, self.small, state[WINDOW], state[MATRIX], step
        )
        return self.out(ops, step.keep(mixed))

    def weights(self) -> Iterator[Weight]:
        yield from (self.taps, self.decay, self.step_bias, self.norm)
        for matrix in self.matrices():
            yield from matrix.weights()

    def matrices(self) -> Iterator[Linear]:
        yield from (self.into, self.rates, self.out)

    def prepare(self, ops: Ops) -> None:
        if self.in_groups:
            h = self.heads
            values = h.value_heads // h.key_heads
            self.into.reorder(
                _by_kind(h.key_heads, (h.key_width, h.key_width, *(values * h.value_width,) * 2))
            )
            self.rates.reorder(_by_kind(h.key_heads, (values, values)))
        for matrix in self.matrices():
            matrix.prepare(ops)
        taps, decay = self.taps.value.squeeze(1), -torch.exp(self.decay.value)
        self.small = DeltaWeights(
            taps, decay, self.step_bias.value, self.norm.value, self.eps, self.most_rate
        )


def _by_kind(groups: int, sizes: tuple[int, ...]) -> Tensor:
    """Returns the permutation of rows that sorts them by kind. Before, they are sorted by group,
    and a group has sizes[i] rows of kind i."""
    rows = torch.arange(groups * sum(sizes)).view(groups, -1)
    return torch.cat([part.flatten() for part in torch.split(rows, list(sizes), dim=1)])
