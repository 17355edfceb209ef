"""Products with weights in four-bit floats, in plain torch: widened for each product."""

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
    whole: Tensor | None  # [out] float64, of NVFP4


def prepare_linear_fp4(
    numbers: Tensor, scale: Tensor, whole: Tensor | None, dtype: torch.dtype
) -> Fp4Matrix:
    """numbers, scale, whole in the layout of kernels/fp4_matrix.py -> what `linear_fp4` takes.
    dtype: the model's, which rows say here too."""
    return Fp4Matrix(numbers.contiguous(), scale.contiguous(), whole)


def linear_fp4(x: Tensor, matrix: Fp4Matrix, bias: Tensor | None = None) -> Tensor:
    """x [T, in] -> x @ widened.T + bias, [T, out], of the model's dtype. The weight is dequantised
    in float32, and rounded to that dtype."""

    def worth(rows: slice) -> Tensor:
        whole = None if matrix.whole is None else matrix.whole[rows]
        return widen_fp4(matrix.numbers[rows], matrix.scale[rows], whole)

    return widened_linear(x, matrix.numbers.shape[0], worth, bias)
