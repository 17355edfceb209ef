"""Products with unquantized weights. One row is multiplied by `linear_one`, up to 16 rows by
`linear_small`, and more by cuBLAS, through torch. T: rows of x, K: inputs of the weight.

Knows rows and a weight; no layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.triton.linear.linear_one import linear_one
from penstock.kernels.triton.linear.linear_small import (
    MOST_ROWS,
    SmallWeight,
    linear_small,
    prepare_small,
)

# For 2 to 16 rows, `linear_small` multiplies weights of at most _WIDE elements, and output heads
# (weights of at least _HEAD outputs). Other weights go to cuBLAS, which is faster for them: a
# weight of 28672 x 4096 takes 0.055 ms with cuBLAS and 0.059 with `linear_small`; one of 4096 x
# 14336 takes 0.0305 and 0.031. Smaller weights gain since `linear_small` can start before the
# previous kernel ends: all kernels of a 1B model take 0.84 ms instead of 0.92. Heads gain 3 %.
_WIDE, _HEAD = 40_000_000, 65_536


def prepare_linear(weight: Tensor) -> SmallWeight:
    """Prepares weight [out, in] for `linear`. The result shares the weight's memory. If
    `linear_small` divides K among programs for this shape, it also has up to 2 MB of scratch
    memory."""
    return prepare_small(weight)


def linear(
    x: Tensor,
    weight: SmallWeight,
    bias: Tensor | None = None,
    *,
    small_rows: int = MOST_ROWS,
    small_numbers: int = _WIDE,
) -> Tensor:
    """Returns x @ weight.T + bias, [T, out]. x: [T, in]. small_rows, small_numbers: see
    kernels/tunables.py."""
    rows = x.shape[0]
    if rows > small_rows or rows == 0 or x.dtype == torch.float32:
        return F.linear(x, weight.weight, bias)
    if rows == 1:
        return linear_one(x, weight.weight, bias)
    if weight.weight.numel() > small_numbers and weight.weight.shape[0] < _HEAD:
        return F.linear(x, weight.weight, bias)
    return linear_small(x, weight, bias)
