"""FixedRow: a row in fixed point for products with integers: 16-bit numbers with a power of two as
scale for every 16 neighbours.

Contract of every writer: x is the result of the plain operation, rounded to the model's dtype;
scale = the power of two of the 16's largest magnitude / 2**14 (at least 2**-101); numbers = x /
scale, rounded half to even. Numbers with 8 bits of mantissa (bfloat16) are exact down to a 128th of
that power of two; smaller ones err by at most a 65,536th of the largest, 64 times less than the
largest's own rounding. Kernels multiply the two bytes, four at a time, by four-bit weights with
exact sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FIXED = 16  # neighbours that share a scale
TOP = 14  # exponent of the largest of the 16 as an integer
LEAST_BITS = 40 << 23  # the least power of two used, 2**-87, as float32 bits


@dataclass(slots=True, frozen=True)
class FixedRow:
    """A row of K numbers, equal to scale * (256 * high + low). A number that is not finite gives an
    infinite scale."""

    # int8 [2, K]: the high bytes, -128 to 127, then the low bytes, whose bits mean 0 to 255
    numbers: Tensor
    scale: Tensor  # float32 [K / 16]
    sums: Tensor  # int32 [K / 16]: sums of 16 neighbours' integers

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
    """Returns x [1, K] in fixed point; K a multiple of 16."""
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
    """Returns the numbers that the row represents, [1, K] in fp64."""
    high, low = row.numbers[0].double(), row.numbers[1].view(torch.uint8).double()
    return ((256 * high + low).view(-1, FIXED) * row.scale.double()[:, None]).view(1, -1)
