"""RMS norms, float32 inside. The weight is applied after rounding to the model's dtype (as HF's Llama does), a float32
weight before (as its Gemma does)."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import Rows
from penstock.kernels.reference.fp8 import quantize_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float, fp8: bool = False) -> Rows:
    """x [..., d], weight [d] -> weight * (x / rms(x)), of x's dtype; fp8: in eight bits, x [T, d]."""
    normed = _rms_norm(x, weight, eps)
    return quantize_rows(normed) if fp8 else normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, fp8: bool = False) -> tuple[Rows, Tensor]:
    """x, residual [T, d] -> (norm of their sum, their sum); residual is overwritten with the sum."""
    residual += x
    return rms_norm(residual, weight, eps, fp8), residual


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if weight.dtype == torch.float32:
        return (wide * scale).mul_(weight).to(x.dtype)
    return (wide * scale).to(x.dtype).mul_(weight)
