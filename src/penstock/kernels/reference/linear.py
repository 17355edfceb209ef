"""Linear: the matrix products. It knows rows and a weight, no layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_MULTIPLE = 16  # fp32 rows on the CPU are padded to it: then a row's result does not move with the row count


def prepare_linear(weight: Tensor) -> Tensor:
    """weight [out, in] as `linear` takes it."""
    return weight.contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] -> x @ weight.T + bias, [T, out]."""
    rows = x.shape[0]
    short = -rows % ROW_MULTIPLE
    if x.dtype != torch.float32 or x.device.type != "cpu" or not short:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, short)), weight, bias)[:rows]
