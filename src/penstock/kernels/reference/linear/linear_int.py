"""Products with integer weights in plain torch.

On a CPU, for models in bfloat16 or float16:

  8 bits, a scale a row   as integers, if the processor has VNNI: rows become 16-bit numbers,
                          multiplied as two products of eight bits. Integer sums are exact, so a
                          row's result can't depend on other rows or on the library's kernel. The
                          error of 16-bit rows is smaller than the rounding of the output
  4 bits in groups        torch's own product (bfloat16)

All other weights are widened for each product. LOG.md, 2026-11-23, compares other methods."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import TakesWideRows
from penstock.kernels.int_matrix import ZERO_OF_FOUR, unpack_four
from penstock.kernels.reference.linear.linear import widened_linear

ROWS_AT_ONCE = (
    # Rows per product, so that float32 sums stay in the cache: a product of 512 rows, 896
    # inputs and 9,728 outputs takes 63 ms in calls of 32 rows, and 100 ms in one call.
    32
)
# largest 16-bit number of a row, so that its high byte is at least -127 and at most 127
MOST = 127 * 256 + 127
MIDDLE = 128  # added to signed bytes of rows, since the products take unsigned bytes
# most inputs, so that sums can't overflow 32 bits: 2**31 / (128 * 128) is twice as many
LONGEST = 2**16
FOUR_GROUPS = (32, 64, 128, 256)  # group sizes of torch's four-bit product
FOUR_ROWS = 16  # torch's four-bit product needs a multiple of so many outputs


@dataclass(slots=True, frozen=True)
class IntMatrix(TakesWideRows):
    """A matrix [out, in] in the layout of kernels/int_matrix.py."""

    numbers: Tensor  # [out, in] int8 or [out, in / 2] uint8
    scale: Tensor  # [out, groups]
    zero: Tensor | None  # [out, groups]
    dtype: torch.dtype


@dataclass(slots=True, frozen=True)
class VnniMatrix(TakesWideRows):
    """A matrix [out, in] of eight-bit integers in FBGEMM's or oneDNN's own layout, and its scales
    [out] float32, divided by MOST. Both libraries' products give the same bits."""

    packed: Any
    by_fbgemm: bool
    scale: Tensor
    zeros: Tensor  # [out] int32: all 0; the product needs the argument
    dtype: torch.dtype


@dataclass(slots=True, frozen=True)
class FourMatrix(TakesWideRows):
    """A matrix [out, in] of four-bit integers in torch's own layout. A stored number means (number
    - 8) * scale + offset."""

    packed: Tensor
    scale_offset: Tensor  # [groups, out, 2] bfloat16
    group: int


Prepared = IntMatrix | VnniMatrix | FourMatrix


def prepare_linear_int(
    numbers: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype
) -> Prepared:
    """Prepares numbers, scale, zero in the layout of kernels/int_matrix.py for `linear_int`. dtype:
    the model's."""
    if (
        numbers.device.type == "cpu"
        and numbers.numel() > 0
        and torch.backends.mkldnn.is_available()
    ):
        if _goes_as_integers(numbers, scale, zero, dtype):
            return pack_vnni(numbers, scale[:, 0].float() / MOST, dtype, has_fbgemm())
        group = 2 * numbers.shape[1] // scale.shape[1]
        fits = group in FOUR_GROUPS and numbers.shape[0] % FOUR_ROWS == 0
        if numbers.dtype == torch.uint8 and dtype == torch.bfloat16 and fits:
            return _four(numbers, scale, zero, group)
    return IntMatrix(numbers.contiguous(), scale.contiguous(), zero, dtype)


def has_fbgemm() -> bool:
    """Returns True if torch has FBGEMM's products. Compared with oneDNN's, they read a weight 1.5
    times as fast at one row, and take 1.25 times as long at 64 rows. PyTorch announces that a later
    release drops the quantized tensors that they need."""
    return torch.backends.quantized.engine in ("x86", "fbgemm") and hasattr(
        torch, "_make_per_channel_quantized_tensor"
    )


def pack_vnni(numbers: Tensor, scale: Tensor, dtype: torch.dtype, by_fbgemm: bool) -> VnniMatrix:
    """Packs numbers [out, in] int8 and scale [out] float32 for `linear_int`."""
    zeros = torch.zeros(len(scale), dtype=torch.int32)
    if not by_fbgemm:
        return VnniMatrix(
            torch.ops.onednn.qlinear_prepack(numbers, None), False, scale, zeros, dtype
        )
    with warnings.catch_warnings():
        # the warning that PyTorch will drop quantized tensors
        warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")
        tensor = torch._make_per_channel_quantized_tensor(numbers, scale.double(), zeros.long(), 0)
        return VnniMatrix(
            torch.ops.quantized.linear_prepack(tensor, None), True, scale, zeros, dtype
        )


def _goes_as_integers(
    numbers: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype
) -> bool:
    whole_rows = numbers.dtype == torch.int8 and scale.shape[1] == 1 and zero is None
    fast = dtype != torch.float32 and numbers.shape[1] <= LONGEST and torch.cpu._is_vnni_supported()
    return whole_rows and fast and sums_are_exact(has_fbgemm())


@cache
def sums_are_exact(by_fbgemm: bool) -> bool:
    """Returns True if a library's sums of byte products are exact on this processor. Without VNNI
    (which ONEDNN_MAX_CPU_ISA can disable for oneDNN), pairs of products are added in 16 bits, which
    large numbers overflow."""
    into = 64
    numbers = torch.full((16, into), 127, dtype=torch.int8)
    matrix = pack_vnni(numbers, torch.ones(16), torch.float32, by_fbgemm)
    return bool((_sums(torch.full((2, into), 127.0), matrix) == into * 127**2).all())


def _four(numbers: Tensor, scale: Tensor, zero: Tensor | None, group: int) -> FourMatrix:
    middle = float(ZERO_OF_FOUR)
    offset = (
        torch.zeros_like(scale)
        if zero is None
        else (middle - zero.float()).mul_(scale.float()).to(scale.dtype)
    )
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack_four(numbers).int(), 1)
    return FourMatrix(packed, torch.stack((scale.t(), offset.t()), 2).contiguous(), group)


def linear_int(x: Tensor, matrix: Prepared, bias: Tensor | None = None) -> Tensor:
    """Returns x @ ((numbers - zero) * scale).T + bias, [T, out], in the model's dtype. x: [T,
    in]."""
    if isinstance(matrix, VnniMatrix):
        if x.shape[0] <= ROWS_AT_ONCE:
            return _vnni(x, matrix, bias)
        return torch.cat([_vnni(rows, matrix, bias) for rows in x.split(ROWS_AT_ONCE)])
    if isinstance(matrix, FourMatrix):
        four = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, matrix.packed, matrix.group, matrix.scale_offset
        )
        return four if bias is None else four.add_(bias)
    return widened_linear(x, matrix.numbers.shape[0], lambda rows: widened(matrix, rows), bias)


def widened(matrix: IntMatrix, rows: slice = slice(None)) -> Tensor:
    """Returns the dequantized numbers of some rows of the matrix, [rows, in] float32."""
    numbers, scale = matrix.numbers[rows], matrix.scale[rows].float()
    if numbers.dtype == torch.uint8:
        numbers, missing = unpack_four(numbers), float(ZERO_OF_FOUR)
    else:
        missing = 0.0
    groups = numbers.float().unflatten(1, (scale.shape[1], -1))
    zero = missing if matrix.zero is None else matrix.zero[rows].float()[..., None]
    return ((groups - zero) * scale[..., None]).flatten(1)


def _vnni(x: Tensor, matrix: VnniMatrix, bias: Tensor | None) -> Tensor:
    """Returns the product with rows that are quantized to 16-bit integers: a row is (its largest
    magnitude / MOST) * (256 * high + low). The products of the high and of the low bytes are added.

    Every operation is exact or rounds each number by itself, so a row's result doesn't depend on
    other rows."""
    count, into = x.shape
    wide = x.float()
    most = wide.abs().amax(1, keepdim=True)
    numbers = wide.mul_(most.reciprocal().mul_(MOST)).round_()
    high_low = torch.empty(2, count, into)
    high = torch.add(numbers, MIDDLE, out=high_low[0]).mul_(1 / 256).floor_()
    torch.sub(numbers, high, alpha=256, out=high_low[1])
    sums = _sums(high_low.view(2 * count, into), matrix)
    out = torch.add(sums[count:], sums[:count], alpha=256)
    if bias is not None:
        return out.mul_(most).add_(bias).to(matrix.dtype)
    return torch.mul(out, most, out=torch.empty(out.shape, dtype=matrix.dtype))


def _sums(rows: Tensor, matrix: VnniMatrix) -> Tensor:
    """Returns the product of rows [T, in] float32, which are whole numbers from -128 to 127, with
    the scaled weight."""
    if matrix.by_fbgemm:
        return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows, 1.0, MIDDLE, matrix.packed
        )
    return torch.ops.onednn.qlinear_pointwise(
        rows.add_(MIDDLE).to(torch.uint8),
        1.0,
        MIDDLE,
        matrix.packed,
        matrix.scale,
        matrix.zeros,
        None,
        1.0,
        0,
        torch.float32,
        "none",
        [],
        "",
    )
