"""Products with float8 weights in plain torch. The weight is widened for each product; scales are
applied to the result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import (
    E4M3,
    E4M3_MOST,
    LEAST_SCALE,
    LOW_BY,
    Form,
    Fp8Rows,
    Rows,
    TakesWideRows,
)
from penstock.kernels.reference.linear.linear import linear


@dataclass(slots=True, frozen=True)
class Fp8Matrix(TakesWideRows):
    """A matrix [out, in] e4m3 and its float32 scales: one a row [out], or several a row
    (fp8_groups.py)."""

    numbers: Tensor
    scale: Tensor
    dtype: torch.dtype


def prepare_linear_fp8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Fp8Matrix:
    """Prepares weight [out, in] e4m3 and scale [out] float32 for `linear_fp8`. dtype:
    the model's."""
    return Fp8Matrix(weight.contiguous(), scale.contiguous(), dtype)


def linear_fp8(x: Rows, matrix: Fp8Matrix, bias: Tensor | None = None) -> Tensor:
    """Returns x @ (scale * weight).T + bias, [T, out], in the model's dtype; scales are applied in
    float32. x: [T, in]."""
    if isinstance(x, Fp8Rows):
        numbers = x.numbers.float() if x.low is None else x.numbers.float() + x.low.float() / LOW_BY
        out = linear(numbers, matrix.numbers.float()).mul_(x.scale).mul_(matrix.scale)
    else:
        out = linear(x, matrix.numbers.to(x.dtype)).float().mul_(matrix.scale)
    return (out if bias is None else out.add_(bias.float())).to(matrix.dtype)


def in_form(x: Tensor, form: Form) -> Rows:
    """Returns x [T, K], quantized as `form` says."""
    return x if form == "wide" else quantize_rows(x, form)


def quantize_rows(x: Tensor, form: Form = "eight") -> Fp8Rows:
    """Quantizes x [T, K] to eight bits, or to pairs of eight bits."""
    wide = x.float()
    scale = wide.abs().amax(1, keepdim=True).div_(E4M3_MOST).clamp_(min=LEAST_SCALE)
    scaled = (wide * scale.reciprocal()).clamp_(-E4M3_MOST, E4M3_MOST)
    numbers = scaled.to(E4M3)
    low = scaled.sub_(numbers.float()).mul_(LOW_BY).to(E4M3) if form == "pair" else None
    return Fp8Rows(numbers, scale, low)
