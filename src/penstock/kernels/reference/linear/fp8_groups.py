"""Products with group-scaled float8 weights in plain torch. A row of the weight has a scale for
every 128 neighbours. The weight is widened for each product."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import spread
from penstock.kernels.reference.linear.fp8 import Fp8Matrix, prepare_linear_fp8
from penstock.kernels.reference.linear.linear import widened_linear


def prepare_linear_fp8_groups(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Fp8Matrix:
    """Prepares weight [out, in] e4m3 and scale [out, ceil(in / 128)] float32 for the product.
    dtype: the model's."""
    return prepare_linear_fp8(weight, scale, dtype)


def linear_fp8_groups(x: Tensor, matrix: Fp8Matrix, bias: Tensor | None = None) -> Tensor:
    """Returns x @ (scale * weight).T + bias, [T, out], in the model's dtype. x: [T, in]. The weight
    is dequantized in float32 and rounded to that dtype."""

    def worth(rows: slice) -> Tensor:
        return matrix.numbers[rows].float().mul_(spread(matrix.scale[rows], x.shape[1]))

    return widened_linear(x, matrix.numbers.shape[0], worth, bias)
