"""Linear: the matrix products. It knows rows and a weight, no layer.

On a CPU whose torch has oneDNN a weight is packed once, at load, into the layout that oneDNN
multiplies from. Measured on 2 cores of a Zen 5 against F.linear: bf16 1.7 to 3 times at 1 to 32
rows and 1.2 times at 1,024; fp32 2.5 to 4.6 times (F.linear takes MKL, which runs a slow path on
AMD); fp16, which this processor cannot multiply, 12 times, over packed fp32.

A row's result does not move with the number of rows in float32, nor in bfloat16 where the library
keeps it: see row_calls.py (tests/kernels/test_linear.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.reference.sampling.row_calls import (
    RowCalls,
    multiplied,
    pack,
    packed_calls,
    packed_product,
    plain_calls,
)

WIDENED_AT_ONCE = 2**22  # numbers
# oneDNN makes a kernel for each shape that it meets, and a step's rows and lengths come in
# thousands of them. It and torch's layer over it (ideep) keep 1,024 each: 0.7 GB after 20 minutes
# of mixed load on the demo model, and growing.
KEPT_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}


@dataclass(slots=True, frozen=True)
class PackedWeight:
    """A weight [out, in] in oneDNN's own layout, float32 for a float16 model."""

    packed: Tensor
    dtype: torch.dtype  # of the rows that come and go


def prepare_linear(weight: Tensor) -> Tensor | PackedWeight:
    """weight [out, in] as `linear` takes it. The weight itself isn't needed afterwards."""
    if weight.device.type != "cpu" or weight.numel() == 0 or not _packs(weight.dtype):
        return weight.contiguous()
    for name, number in KEPT_KERNELS.items():
        os.environ.setdefault(name, number)  # read when the first product is made
    wide = weight.float() if weight.dtype == torch.float16 else weight
    return PackedWeight(pack(wide), weight.dtype)


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, in] -> x @ weight.T + bias, [T, out]."""
    if isinstance(weight, PackedWeight):
        return _packed(x, weight, bias)
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    calls = plain_calls(x.dtype, torch.get_num_threads())
    return multiplied(x, calls, lambda some: F.linear(some, weight, bias))


def linear_gated(x: Tensor, weight: Tensor | PackedWeight, activation: str) -> None:
    """Returns None: there is no faster form than `linear` and the gate behind it, which are what it
    is held against."""


def widened_linear(
    x: Tensor, outputs: int, worth: Callable[[slice], Tensor], bias: Tensor | None = None
) -> Tensor:
    """x [T, in] times a matrix that is stored otherwise, a stretch of its rows at a time -> [T,
    outputs].

    worth: rows of the matrix -> their numbers [rows, in] float32, which are rounded to x's dtype.
    """
    out = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
    if x.dtype == torch.float16 and x.device.type == "cpu":
        x, bias = x.float(), None if bias is None else bias.float()  # few processors multiply it
    each = max(1, WIDENED_AT_ONCE // x.shape[1])
    packs = x.device.type == "cpu" and _better_packed(x.dtype)
    for first in range(0, outputs, each):
        rows = slice(first, first + each)
        weight = worth(rows).to(x.dtype)
        out[:, rows] = linear(
            x, prepare_linear(weight) if packs else weight, None if bias is None else bias[rows]
        )
    return out


def _packs(dtype: torch.dtype) -> bool:
    """Returns whether weights of that dtype are packed here: oneDNN refuses bfloat16 where there is
    AVX2 at most, and F.linear takes it."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _better_packed(dtype: torch.dtype) -> bool:
    """Returns whether a row keeps its bits with packed weights, and with plain ones in calls of few
    rows at best: asked of float32 alone, of which that is promised."""
    if dtype != torch.float32 or not _packs(dtype):
        return False
    threads = torch.get_num_threads()
    return (
        plain_calls(dtype, threads) != RowCalls(None, True) and packed_calls(dtype, threads).keeps
    )


def _packed(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    if weight.dtype == torch.bfloat16:
        return packed_product(weight.packed, bias)(x)
    if weight.dtype == torch.float16:
        x, bias = x.float(), None if bias is None else bias.float()
    calls = packed_calls(x.dtype, torch.get_num_threads())
    return multiplied(x, calls, packed_product(weight.packed, bias)).to(weight.dtype)
