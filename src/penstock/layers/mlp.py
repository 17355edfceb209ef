"""Mlp: the gated feed-forward part, gate and up in one product."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.ops import Ops
from penstock.layers.linear import Linear


@dataclass(slots=True)
class Mlp:
    """down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    gate_up: Linear  # [2 * intermediate, d]: gate's rows, then up's
    down: Linear  # [d, intermediate]

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        """x `[T, d]` -> `[T, d]`."""
        return self.down(ops, ops.silu_mul(self.gate_up(ops, x)))
