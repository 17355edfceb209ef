"""Norm: an RMS norm, with the residual stream's sum in the same kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.fp8_rows import Rows, wide
from penstock.kernels.ops import Ops
from penstock.layers.linear import Linear
from penstock.quant.weight import Weight


@dataclass(slots=True)
class Norm:
    """Root-mean-square norm (arXiv:1910.07467) over the last dimension."""

    weight: Weight  # [d]; float32 where it is multiplied by before the answer is rounded (Gemma's way)
    eps: float

    def __call__(self, ops: Ops, x: Tensor, residual: Tensor | None, reader: Linear | None) -> tuple[Rows, Tensor]:
        """x `[T, d]` joins the residual `[T, d]` (None: x opens it); returns the normed sum, as `reader` takes it
        (None: wide), and the sum."""
        form = "wide" if reader is None else reader.form(x.shape[0])
        if residual is None:
            return ops.rms_norm(x, self.weight.value, self.eps, form), x
        return ops.add_rms_norm(x, residual, self.weight.value, self.eps, form)

    def alone(self, ops: Ops, x: Tensor) -> Tensor:
        """x `[T, d]` -> its norm, beside the residual stream."""
        return wide(ops.rms_norm(x, self.weight.value, self.eps, "wide"))

    def last(self, ops: Ops, x: Tensor, residual: Tensor | None) -> Tensor:
        """x, residual `[T, d]` -> the norm of their sum, for the head."""
        return wide(self(ops, x, residual, None)[0])
