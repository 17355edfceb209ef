"""TwoMixersLayer: Mamba2 and attention in parallel, then an MLP (Falcon-H1, arXiv:2507.22448). Both
mixers read the same norm, and their outputs are added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.kernels.inputs import StepInputs
from penstock.kernels.ops import Ops
from penstock.layers.attention import Attention
from penstock.layers.block import Block, Keeper
from penstock.layers.linear import Linear
from penstock.layers.mamba2 import Mamba2
from penstock.layers.mlp import Mlp
from penstock.layers.norm import Norm
from penstock.parallel.sharded_weight import Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Constant factors of the inputs and outputs of a layer's parts, and of the MLP's gate before
    silu."""

    mamba_in: float = 1.0
    mamba_out: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0
    gate: float = 1.0
    mlp_out: float = 1.0


@dataclass(slots=True)
class TwoMixersLayer:
    """A layer. Computes y = x + mamba(norm(x)) + attention(norm(x)), then y + mlp(norm(y)), with
    the factors of `Multipliers`."""

    norm: Norm
    mamba: Mamba2
    attention: Attention
    mlp_norm: Norm
    mlp: Mlp
    by: Multipliers

    def __call__(
        self, ops: Ops, x: Tensor, residual: Tensor | None, step: StepInputs, state: Sequence[Any]
    ) -> tuple[Tensor, Tensor]:
        rows, residual = self.norm(ops, x, residual, None)
        assert isinstance(rows, Tensor), "two products read it"
        recurrent, attending = state
        out = self.mamba(ops, _times(rows, self.by.mamba_in), step, recurrent).mul_(
            self.by.mamba_out
        )
        attended = self.attention(ops, _times(rows, self.by.attention_in), step, attending)
        out.add_(attended, alpha=self.by.attention_out)
        rows, residual = self.mlp_norm(ops, out, step.keep(residual), self.mlp.gate_up)
        gate_up = self.mlp.gate_up(ops, rows)
        gate_up[:, : gate_up.shape[1] // 2].mul_(self.by.gate)
        middle = ops.silu_mul(gate_up, self.mlp.down.form(gate_up.shape[0]))
        return self.mlp.down(ops, middle).mul_(self.by.mlp_out), residual

    def keeps(self) -> Sequence[Keeper]:
        return self.mamba, self.attention

    def matrices(self) -> Iterator[Linear]:
        for part in (self.mamba, self.attention, self.mlp):
            yield from part.matrices()

    def weights(self) -> Iterator[Weight]:
        for part in (self.norm, self.mlp_norm, self.mamba, self.attention, self.mlp):
            yield from part.weights()

    def prepare(self, ops: Ops) -> Block:
        for part in (self.mamba, self.attention, self.mlp):
            part.prepare(ops)
        return self

    @property
    def experts(self) -> None:
        """None: the layer has no experts."""


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
