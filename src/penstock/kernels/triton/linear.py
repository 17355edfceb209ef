"""Linear: matrix products. Few rows take `linear_small`; the others are cuBLAS's, through torch.

It knows rows and a weight, no layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.triton.linear_small import MOST_ROWS, SmallWeight, linear_small, prepare_small


def prepare_linear(weight: Tensor) -> SmallWeight:
    """weight [out, in] as `linear` takes it: the same memory, and up to 2 MB of scratch where K is split."""
    return prepare_small(weight)


def linear(x: Tensor, weight: SmallWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, in] -> x @ weight.T + bias, [T, out]."""
    if 0 < x.shape[0] <= MOST_ROWS and x.dtype != torch.float32:
        return linear_small(x, weight, bias)
    return F.linear(x, weight.weight, bias)
