"""Norm: an RMS norm, with the residual stream's sum in the same kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.ops import Ops


@dataclass(slots=True)
class Norm:
    """Root-mean-square norm (arXiv:1910.07467) over the last dimension."""

    weight: Tensor  # [d]
    eps: float

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """x `[T, d]` joins the residual `[T, d]` (None: x opens it); returns the normed sum and the sum."""
        if residual is None:
            return ops.rms_norm(x, self.weight, self.eps), x
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
