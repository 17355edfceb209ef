"""Products with integer weights in plain torch.

On a CPU that multiplies eight bits (VNNI) weights of eight bits with a scale a row are multiplied as integers, by rows
of sixteen bits: two products of eight. Their sums are whole numbers and exact, so that a row's result can't move with
the rows beside it, whichever of oneDNN's kernels makes it; rows lose less than by bfloat16's own rounding of what comes
out. All others are widened for each product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.fp8_rows import Form
from penstock.kernels.int_matrix import ZERO_OF_FOUR, unpack_four
from penstock.kernels.reference.linear import linear

AT_ONCE = 2**22  # numbers that are widened at a time
MOST = 127 * 256 + 127  # that a number of a row may be, of 16 bits: its high byte lies within -127 .. 127
MIDDLE = 128  # oneDNN's fast products take rows as unsigned bytes
LONGEST = 2**16  # numbers in a row of which no sum can pass 32 bits: 2**31 / (128 * 128) is twice that
LEAST_SCALE = 1e-30


@dataclass(slots=True, frozen=True)
class IntMatrix:
    """A matrix [out, in] in the layout of kernels/int_matrix.py."""

    numbers: Tensor  # [out, in] int8 or [out, in / 2] uint8
    scale: Tensor  # [out, groups]
    zero: Tensor | None  # [out, groups]
    dtype: torch.dtype
    streamed: None = None

    def form(self, rows: int) -> Form:
        """Returns how so many rows are wanted."""
        return "wide"


@dataclass(slots=True, frozen=True)
class VnniMatrix:
    """A matrix [out, in] of eight bits in oneDNN's own layout, a scale a row [out] float32."""

    packed: Tensor
    scale: Tensor
    zeros: Tensor  # [out] int32: there are none, and the product asks for them
    dtype: torch.dtype
    streamed: None = None

    def form(self, rows: int) -> Form:
        """Returns how so many rows are wanted."""
        return "wide"


def prepare_linear_int(
    numbers: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype
) -> IntMatrix | VnniMatrix:
    """numbers, scale, zero in the layout of kernels/int_matrix.py, the model's dtype -> what `linear_int` takes."""
    whole_rows = numbers.dtype == torch.int8 and scale.shape[1] == 1 and zero is None
    if not (whole_rows and dtype != torch.float32 and _has_vnni(numbers)):
        return IntMatrix(numbers.contiguous(), scale.contiguous(), zero, dtype)
    packed = torch.ops.onednn.qlinear_prepack(numbers, None)
    return VnniMatrix(packed, scale[:, 0].float(), torch.zeros(len(scale), dtype=torch.int32), dtype)


def _has_vnni(numbers: Tensor) -> bool:
    here = numbers.device.type == "cpu" and numbers.numel() > 0 and numbers.shape[1] <= LONGEST
    return here and torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


def linear_int(x: Tensor, matrix: IntMatrix | VnniMatrix, bias: Tensor | None = None) -> Tensor:
    """x [T, in] -> x @ ((numbers - zero) * scale).T + bias, [T, out], of the model's dtype."""
    if isinstance(matrix, VnniMatrix):
        return _vnni(x, matrix, bias)
    out = torch.empty((x.shape[0], matrix.numbers.shape[0]), dtype=x.dtype, device=x.device)
    if x.dtype == torch.float16 and x.device.type == "cpu":
        x, bias = x.float(), None if bias is None else bias.float()  # few processors multiply it
    each = max(1, AT_ONCE // x.shape[1])
    for first in range(0, out.shape[1], each):
        rows = slice(first, first + each)
        out[:, rows] = linear(x, widened(matrix, rows).to(x.dtype), None if bias is None else bias[rows])
    return out


def widened(matrix: IntMatrix, rows: slice = slice(None)) -> Tensor:
    """Returns what rows of the matrix are worth, [rows, in] float32."""
    numbers, scale = matrix.numbers[rows], matrix.scale[rows].float()
    if numbers.dtype == torch.uint8:
        numbers, missing = unpack_four(numbers), float(ZERO_OF_FOUR)
    else:
        missing = 0.0
    groups = numbers.float().unflatten(1, (scale.shape[1], -1))
    zero = missing if matrix.zero is None else matrix.zero[rows].float()[..., None]
    return ((groups - zero) * scale[..., None]).flatten(1)


def _vnni(x: Tensor, matrix: VnniMatrix, bias: Tensor | None) -> Tensor:
    """A row is scale * (256 * high + low), both of eight bits: their products are taken together."""
    count = x.shape[0]
    wide = x.float()
    scale = wide.abs().amax(1, keepdim=True).div_(MOST).clamp_(min=LEAST_SCALE)
    words = (wide / scale).round_().add_(MIDDLE * 256 + MIDDLE).to(torch.int32)
    low_high = words.view(torch.uint8).view(count, -1, 4)[:, :, :2].permute(2, 0, 1).reshape(2 * count, -1)
    sums = torch.ops.onednn.qlinear_pointwise(
        low_high, 1.0, MIDDLE, matrix.packed, matrix.scale, matrix.zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    out = sums[count:].mul_(256).add_(sums[:count]).mul_(scale)
    return (out if bias is None else out.add_(bias.float())).to(matrix.dtype)
