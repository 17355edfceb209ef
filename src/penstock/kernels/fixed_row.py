"""FixedRow: one row of activations in 16-bit fixed point. Every 16 neighbours share a power of two
as their scale. It is the input of one-row products with four-bit weights.

Every function that writes a FixedRow follows this definition. x is the result of the plain
operation, rounded to the model's dtype. P is the largest power of two that is not above the largest
magnitude of the 16 numbers, and at least 2**-87. Then scale = P / 2**14, and each number becomes
the integer x / scale, rounded half to even.

So a number errs by at most scale / 2 = P / 2**15. A bfloat16 has 8 significant bits, so it is
represented exactly if its magnitude is at least P / 2**7. For comparison, rounding the largest of
the 16 numbers to bfloat16 errs by up to P / 2**8, which is 128 times as much. Kernels multiply the
high and the low byte of an integer separately by four-bit weights, four numbers at a time; these
sums are exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FIXED = 16  # neighbours that share a scale
TOP = 14  # the largest of the 16 numbers becomes an integer of at least 2**14
LEAST_BITS = 40 << 23  # the least P, 2**-87, as bits of a float32


@dataclass(slots=True, frozen=True)
class FixedRow:
    """A row of K numbers. Each equals scale * (256 * high + low). The scale is infinite if one of
    its 16 numbers is not finite."""

    # int8 [2, K]: the high bytes (-128 to 127), then the low bytes (to be read as unsigned)
    numbers: Tensor
    scale: Tensor  # float32 [K / 16]
    sums: Tensor  # int32 [K / 16]: sum of the integers 256 * high + low of 16 neighbours

    @property
    def width(self) -> int:
        return self.numbers.shape[1]


def empty_fixed(width: int, device: torch.device) -> FixedRow:
    """Returns an uninitialised row of `width` numbers, a multiple of 16."""
    return FixedRow(
        torch.empty((2, width), dtype=torch.int8, device=device),
        torch.empty(width // FIXED, dtype=torch.float32, device=device),
        torch.empty(width // FIXED, dtype=torch.int32, device=device),
    )


def to_fixed(x: Tensor) -> FixedRow:
    """Returns x [1, K] in fixed point. K is a multiple of 16."""
    blocks = x.float().view(-1, FIXED)
    most = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(1)
    power = (most & 0x7F800000).clamp(min=LEAST_BITS)
    by = ((254 << 23) - power + (TOP << 23)).view(torch.float32)
    whole = (
        torch.nan_to_num(blocks * by[:, None], posinf=0.0, neginf=0.0)
        .round()
        .clamp(max=32767)
        .int()
        .view(1, -1)
    )
    numbers = torch.cat((whole >> 8, (whole << 24) >> 24)).to(torch.int8)
    return FixedRow(
        numbers, power.view(torch.float32) * 2.0**-TOP, whole.view(-1, FIXED).sum(1).int()
    )


def worth_of(row: FixedRow) -> Tensor:
    """Returns the values of a fixed-point row, [1, K] float64."""
    high, low = row.numbers[0].double(), row.numbers[1].view(torch.uint8).double()
    return ((256 * high + low).view(-1, FIXED) * row.scale.double()[:, None]).view(1, -1)
