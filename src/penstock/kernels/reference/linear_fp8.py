"""Products with float8 weights in plain torch: the weight is widened for each product, its scales come behind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(slots=True, frozen=True)
class Fp8Matrix:
    """A matrix [out, in] e4m3 and a scale a row [out] float32."""

    numbers: Tensor
    scale: Tensor


def prepare_linear_fp8(weight: Tensor, scale: Tensor) -> Fp8Matrix:
    """weight [out, in] e4m3, scale [out] float32 -> what `linear_fp8` takes."""
    return Fp8Matrix(weight.contiguous(), scale.contiguous())


def linear_fp8(x: Tensor, matrix: Fp8Matrix, bias: Tensor | None = None) -> Tensor:
    """x [T, in] -> x @ (scale * weight).T + bias, [T, out], of x's dtype; the scale is applied in float32."""
    out = F.linear(x, matrix.numbers.to(x.dtype)).float().mul_(matrix.scale)
    return (out if bias is None else out.add_(bias.float())).to(x.dtype)
