"""Linear: matrix products. One row takes `linear_one`, up to 16 rows `linear_small`; more take
cuBLAS, through torch.

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

# Limits of `linear_small`. For 2 to 16 rows, larger weights go to cuBLAS: 28672 x 4096 takes it
# 0.055 ms and `linear_small` 0.059, 4096 x 14336 0.0305 and 0.031. Smaller ones gain from early
# starts (a 1B model's kernels 0.84 ms against 0.92), heads 3 %.
_WIDE, _HEAD = 40_000_000, 65_536


def prepare_linear(weight: Tensor) -> SmallWeight:
    """Prepares weight [out, in] for `linear`: the same memory, and up to 2 MB of scratch if K is
    split."""
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
