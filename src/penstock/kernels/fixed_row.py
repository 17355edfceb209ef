"""FixedRow: a row in fixed point, for products that multiply integers: of every 16 neighbours a
power of two, and each as 16 bits.

Contract of whatever writes it: x is what the plain operation would give, rounded to the model's
dtype; scale = the power of two of the 16's largest magnitude / 2**14 (at least 2**-101); numbers =
x / scale, rounded to the even. Numbers of eight bits of mantissa (bfloat16) keep all of them down
to a 128th of that power; what is smaller is off by at most a 65,536th of the largest, 64 times less
than the largest's own rounding. Its two bytes are multiplied four at a time by weights of four
bits, with exact sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FIXED = 16  # neighbours that share a scale
TOP = 14  # the power of two that the largest of them has as an integer
LEAST_BITS = 40 << 23  # of the least power that counts, 2**-87, as a float32


@dataclass(slots=True, frozen=True)
class FixedRow:
    """A row of K numbers, worth scale * (256 * high + low). What isn't finite has an infinite
    scale."""

    # int8 [2, K]: the highs, -128 to 127, then the lows, whose bits are those of 0 to 255
    numbers: Tensor
    scale: Tensor  # float32 [K / 16]
    sums: Tensor  # int32 [K / 16]: of the integers of 16 neighbours

    @property
    def width(self) -> int:
        return self.numbers.shape[1]


def empty_fixed(width: int, device: torch.device) -> FixedRow:
    """Returns a row of `width` numbers, a multiple of 16, that is not written yet."""
    return FixedRow(
        torch.empty((2, width), dtype=torch.int8, device=device),
        torch.empty(width // FIXED, dtype=torch.float32, device=device),
        torch.empty(width // FIXED, dtype=torch.int32, device=device),
    )


def to_fixed(x: Tensor) -> FixedRow:
    """x [1, K], K a multiple of 16 -> the same in fixed point."""
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
    """Returns what the row is worth, [1, K] in fp64."""
    high, low = row.numbers[0].double(), row.numbers[1].view(torch.uint8).double()
    return ((256 * high + low).view(-1, FIXED) * row.scale.double()[:, None]).view(1, -1)
