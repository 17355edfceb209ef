"""Products with integer weights in plain torch.

On a CPU, for models in bfloat16 or float16:

  8 bits, a scale a row   as integers, if the processor has VNNI: rows become 16-bit numbers, in two
                          products of eight bits. Integer sums are exact, so a row's result can't
                          depend on other rows or the kernel, and 16 bits lose less of a row than
                          the rounding of the output
  4 bits in groups        torch's own product (bfloat16)

All others are widened for each product. Comparison with other methods: LOG.md, 2026-11-23."""

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
    # rows whose float32 sums stay in a cache: 512 rows of 896 to 9,728 take 63 ms in 32s, 100 ms at
    # once
    32
)
# largest 16-bit number of a row: its high byte is within -127 .. 127
MOST = 127 * 256 + 127
MIDDLE = 128  # offset that makes rows unsigned bytes for the products
# numbers of a row whose sums can't overflow 32 bits: 2**31 / (128 * 128) is twice that
LONGEST = 2**16
FOUR_GROUPS = (32, 64, 128, 256)  # group sizes of torch's four-bit product
FOUR_ROWS = 16  # outputs must be a multiple of it


@dataclass(slots=True, frozen=True)
class IntMatrix(TakesWideRows):
    """A matrix [out, in] in the layout of kernels/int_matrix.py."""

    numbers: Tensor  # [out, in] int8 or [out, in / 2] uint8
    scale: Tensor  # [out, groups]
    zero: Tensor | None  # [out, groups]
    dtype: torch.dtype


@dataclass(slots=True, frozen=True)
class VnniMatrix(TakesWideRows):
    """A matrix [out, in] of eight bits in FBGEMM's or oneDNN's own layout, and its scales [out]
    float32 / MOST. Both libraries give the same bits."""

    packed: Any
    by_fbgemm: bool
    scale: Tensor
    zeros: Tensor  # [out] int32: all 0; the product needs the argument
    dtype: torch.dtype


@dataclass(slots=True, frozen=True)
class FourMatrix(TakesWideRows):
    """A matrix [out, in] of four bits in torch's own layout; a number stands for (number - 8) *
    scale + offset."""

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
    """Returns True if torch has FBGEMM's products: they stream a weight 1.5 times as fast as
    oneDNN's at one row, and take 1.25 times as long at 64. PyTorch announces that a later release
    drops the tensors they use."""
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
        # PyTorch's notice that these tensors will be dropped
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
    """Returns True if a library's sums of byte products are exact. Without VNNI (ONEDNN_MAX_CPU_ISA
    can disable it for oneDNN) pairs are added in 16 bits, which overflow for the largest numbers.
    """
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
    """Returns the numbers of some rows of the matrix, [rows, in] float32."""
    numbers, scale = matrix.numbers[rows], matrix.scale[rows].float()
    if numbers.dtype == torch.uint8:
        numbers, missing = unpack_four(numbers), float(ZERO_OF_FOUR)
    else:
        missing = 0.0
    groups = numbers.float().unflatten(1, (scale.shape[1], -1))
    zero = missing if matrix.zero is None else matrix.zero[rows].float()[..., None]
    return ((groups - zero) * scale[..., None]).flatten(1)


def _vnni(x: Tensor, matrix: VnniMatrix, bias: Tensor | None) -> Tensor:
    """Multiplies rows as 16-bit integers: a row is (its largest magnitude / MOST) * (256 * high +
    low), and the products of both bytes are taken together.

    Each step is one rounding, so the result doesn't depend on other rows. A row of zeros gives 0
    for any integers."""
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
    """Multiplies rows [T, in] float32, whole numbers of -128 to 127, by the weight's numbers and
    scales."""
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
