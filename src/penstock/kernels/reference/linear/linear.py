"""Products with unquantized weights in plain torch. Knows rows and a weight; no layer.

On a CPU whose torch has oneDNN, a weight is packed once, at load, into oneDNN's layout. On 2 cores
of a Zen 5, compared with F.linear, bf16 is 1.7 to 3 times as fast at 1 to 32 rows, and 1.2 times at
1,024. fp32 is 2.5 to 4.6 times as fast (F.linear uses MKL, which is slow on AMD). fp16, which this
processor cannot multiply, is computed in packed fp32, 12 times as fast.

In float32, a row's result doesn't depend on the number of rows; in bfloat16 it depends on the
library. See row_calls.py and tests/kernels/test_linear.py."""

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

WIDENED_AT_ONCE = 2**22  # numbers of a quantized weight that are widened at once
# Environment variables that limit kernel caches. oneDNN makes a kernel for each shape, and the
# numbers of rows and tokens of steps give thousands of shapes. By default, oneDNN and torch's layer
# over it (ideep) keep 1,024 kernels each, which took 0.7 GB, still growing, after 20 minutes of
# mixed load on the demo model.
KEPT_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}


@dataclass(slots=True, frozen=True)
class PackedWeight:
    """A weight [out, in] in oneDNN's own layout; it is float32 for a float16 model."""

    packed: Tensor
    dtype: torch.dtype  # dtype of the product's input and output


def prepare_linear(weight: Tensor) -> Tensor | PackedWeight:
    """Prepares weight [out, in] for `linear`. The weight itself isn't used afterwards."""
    if weight.device.type != "cpu" or weight.numel() == 0 or not _packs(weight.dtype):
        return weight.contiguous()
    for name, number in KEPT_KERNELS.items():
        os.environ.setdefault(name, number)  # torch and oneDNN read it at the first product
    wide = weight.float() if weight.dtype == torch.float16 else weight
    return PackedWeight(pack(wide), weight.dtype)


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Returns x @ weight.T + bias, [T, out]. x: [T, in]."""
    if isinstance(weight, PackedWeight):
        return _packed(x, weight, bias)
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    calls = plain_calls(x.dtype, torch.get_num_threads())
    return multiplied(x, calls, lambda some: F.linear(some, weight, bias))


def linear_gated(x: Tensor, weight: Tensor | PackedWeight, activation: str) -> None:
    """Returns None: plain torch has no fused product that is faster than `linear` and then the
    gate."""


def widened_linear(
    x: Tensor, outputs: int, worth: Callable[[slice], Tensor], bias: Tensor | None = None
) -> Tensor:
    """Multiplies x [T, in] by a quantized matrix [outputs, in], of which some rows are widened at a
    time: [T, outputs].

    worth: function from a slice of the matrix's rows to their dequantized numbers [rows, in]
    float32, which are then rounded to x's dtype."""
    out = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
    if x.dtype == torch.float16 and x.device.type == "cpu":
        # multiplied in float32, since few processors multiply float16
        x, bias = x.float(), None if bias is None else bias.float()
    each = max(1, WIDENED_AT_ONCE // x.shape[1])
    packs = x.device.type == "cpu" and _better_packed(x.dtype)
    for first in range(0, outputs, each):
        rows = slice(first, first + each)
        weight = worth(rows).to(x.dtype)
        out[:, rows] = linear(
            x, prepare_linear(weight) if packs else weight, None if bias is None else bias[rows]
        )
    return out


def moves_rows(dtype: torch.dtype) -> bool:
    """Returns True if a row's bits depend on other rows, as bfloat16's do in packed products with
    AMX. Without AMX nothing is tried."""
    return (
        _packs(dtype)
        and torch.cpu._is_amx_tile_supported()
        and not packed_calls(dtype, torch.get_num_threads()).keeps
    )


def _packs(dtype: torch.dtype) -> bool:
    """Returns True if weights of this dtype are packed. bfloat16 is not packed on processors
    without AVX-512, where oneDNN doesn't support it and F.linear does."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _better_packed(dtype: torch.dtype) -> bool:
    """Returns True if a row's bits don't depend on other rows with packed weights, while with plain
    weights they do, or calls of a fixed number of rows are necessary. Tested for float32 only,
    where it is guaranteed."""
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
