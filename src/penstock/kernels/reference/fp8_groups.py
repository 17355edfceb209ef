"""Products with float8 weights that have a scale for every 128 neighbours of a row, in plain torch: widened."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import Form
from penstock.kernels.reference.linear import linear

GROUP = 128
AT_ONCE = 2**22  # numbers that are widened at a time


@dataclass(slots=True, frozen=True)
class Fp8Groups:
    """A matrix [out, in] e4m3 and its scales [out, ceil(in / 128)] float32."""

    numbers: Tensor
    scale: Tensor
    dtype: torch.dtype
    streamed: None = None

    def form(self, rows: int) -> Form:
        """Returns how so many rows are wanted."""
        return "wide"


def prepare_linear_fp8_groups(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Fp8Groups:
    """weight [out, in] e4m3, scale [out, ceil(in / 128)] float32, the model's dtype -> what the
    product takes."""
    return Fp8Groups(weight.contiguous(), scale.contiguous(), dtype)


def linear_fp8_groups(x: Tensor, matrix: Fp8Groups, bias: Tensor | None = None) -> Tensor:
    """x [T, in] -> x @ (scale * weight).T + bias, [T, out], of the model's dtype. The weight is dequantised in float32,
    and rounded to that dtype."""
    out = torch.empty((x.shape[0], matrix.numbers.shape[0]), dtype=x.dtype, device=x.device)
    if x.dtype == torch.float16 and x.device.type == "cpu":
        x, bias = x.float(), None if bias is None else bias.float()  # few processors multiply it
    into = x.shape[1]
    each = max(1, AT_ONCE // into)
    for first in range(0, out.shape[1], each):
        rows = slice(first, first + each)
        scale = matrix.scale[rows].repeat_interleave(GROUP, 1)[:, :into]
        weight = matrix.numbers[rows].float().mul_(scale)
        out[:, rows] = linear(x, weight.to(x.dtype), None if bias is None else bias[rows])
    return out
