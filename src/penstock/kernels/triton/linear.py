"""Linear on CUDA: the library's product, and for 1 to 16 rows one that streams the weight once (linear_small).

It knows a weight and rows; no layer. Scratch of the small product belongs to its weight, so that nothing is shared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.triton.linear_small import MOST_ROWS, Cut, SmallLinear, cut_of


@dataclass(slots=True, frozen=True)
class StreamedWeight:
    """A weight [out, in], how it is cut for few rows, and the scratch of that."""

    weight: Tensor
    small: SmallLinear
    cut: Cut


def prepare_linear(weight: Tensor) -> StreamedWeight:
    """weight [out, in] as `linear` takes it."""
    weight = weight.contiguous()
    cut = cut_of(*weight.shape)
    split = cut.split if cut.split > 1 else 0  # without a split there are no parts
    return StreamedWeight(weight, SmallLinear(weight.shape[0], weight.device, split), cut)


def linear(x: Tensor, weight: StreamedWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, in] -> x @ weight.T + bias, [T, out]."""
    if 1 <= x.shape[0] <= MOST_ROWS and x.dtype != torch.float32:
        return weight.small(x.contiguous(), weight.weight, bias, weight.cut)
    return F.linear(x, weight.weight, bias)
