"""Products with four-bit float weights in plain torch. The weight is widened for each product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.fp4_matrix import widen_fp4
from penstock.kernels.fp8_rows import TakesWideRows
from penstock.kernels.reference.linear.linear import widened_linear


@dataclass(slots=True, frozen=True)
class Fp4Matrix(TakesWideRows):
    """A matrix [out, in] in the layout of kernels/fp4_matrix.py."""

    numbers: Tensor  # [out, in / 2] uint8
    scale: Tensor  # [out, groups] uint8 or e4m3
    whole: Tensor | None  # [out] float64, NVFP4 only


def prepare_linear_fp4(
    numbers: Tensor, scale: Tensor, whole: Tensor | None, dtype: torch.dtype
) -> Fp4Matrix:
    """Prepares numbers, scale, whole in the layout of kernels/fp4_matrix.py for `linear_fp4`.
    dtype: not used; the product has the dtype of its rows."""
    return Fp4Matrix(numbers.contiguous(), scale.contiguous(), whole)


def linear_fp4(x: Tensor, matrix: Fp4Matrix, bias: Tensor | None = None) -> Tensor:
    """Returns x @ widened.T + bias, [T, out], in the model's dtype. x: [T, in]. The weight is
    dequantized in float32 and rounded to that dtype."""

    def worth(rows: slice) -> Tensor:
        whole = None if matrix.whole is None else matrix.whole[rows]
        return widen_fp4(matrix.numbers[rows], matrix.scale[rows], whole)

    return widened_linear(x, matrix.numbers.shape[0], worth, bias)
