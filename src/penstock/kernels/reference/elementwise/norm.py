"""RMS norms, float32 inside. The weight is applied after rounding to the model's dtype (as HF's
Llama does), a float32 weight before (as its Gemma does)."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import Form, Rows
from penstock.kernels.reference.linear.fp8 import in_form


def rms_norm(x: Tensor, weight: Tensor, eps: float, form: Form = "wide") -> Rows:
    """x [..., d], weight [d] -> weight * (x / rms(x)), of x's dtype; x [T, d] where it is to be in
    another form."""
    return in_form(_rms_norm(x, weight, eps), form)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    form: Form = "wide",
    first: Tensor | None = None,
) -> tuple[Rows, Tensor]:
    """x, residual [T, d] -> (norm of their sum, their sum); residual is overwritten with the sum.
    first: the weight of a norm that x passes before."""
    residual += x if first is None else _rms_norm(x, first, eps)
    return rms_norm(residual, weight, eps, form), residual


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if weight.dtype == torch.float32:
        return (wide * scale).mul_(weight).to(x.dtype)
    return (wide * scale).to(x.dtype).mul_(weight)
