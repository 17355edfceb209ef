"""Scales of four-bit floats as the kernels take them: one form for NVFP4 and MXFP4, a byte a group and a float32 a row.

    a number is worth e2m1 * (1 + (byte & 7) / 8) * 2 ** ((byte >> 3) - 29) * by[row]

Five bits of exponent and three of fraction: any e4m3 without its sign, but 0, has such a byte, none of them without a
leading one, so that a kernel makes a float of it by a shift, in bfloat16, float16 and float32 alike. What is 0 or
negative is brought into the numbers. A row of MXFP4 counts from its largest power; groups 2 ** 25 times smaller become
0, which float32 could not add to the others either. It knows tensors; no kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.int_matrix import SPAN

MOST, LEAST = 30, 6  # exponents: 31 is infinity in float16; a half times less than LEAST's is no float16
NV_BY = 22  # an e4m3's exponent 8 becomes 30


UNIT = 16  # groups of 16 whose scales lie together


def in_pairs(short: Tensor, k: int, turn: int = SPAN // 2) -> Tensor:
    """short [..., N, groups] bytes of rows of K numbers, of which 2 * turn neighbours lie in the halves of `turn` bytes
    -> int16 [..., ceil(K / 256), N, 8]: pairs, of 16 bytes of numbers the scale of those in their low halves and of
    those in the high ones. Those of 256 neighbours lie together, so that few outputs of long rows are read in whole
    sectors, and many outputs of short stretches too."""
    each = short.repeat_interleave(k // 16 // short.shape[-1], -1)
    each = each.unflatten(-1, (-1, 2, turn // 16)).transpose(-1, -2).flatten(-3)
    units = F.pad(each, (0, -each.shape[-1] % UNIT)).unflatten(-1, (-1, UNIT))
    return units.transpose(-3, -2).contiguous().view(torch.int16)


def in_words(short: Tensor) -> Tensor:
    """short [..., N, K / 32] bytes, MXFP4's -> int32 [..., ceil(K / 128), N]: four scales of an output, and outputs
    side by side."""
    words = F.pad(short, (0, -short.shape[-1] % 4)).view(torch.int32)
    return words.mT.contiguous()


def short_scales(numbers: Tensor, scale: Tensor, whole: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """numbers, scale, whole in the layout of kernels/fp4_matrix.py -> numbers [N, K / 2], which are the given ones
    where nothing had to be brought into them, bytes [N, groups] and by [N] float32."""
    if whole is None:
        top, exponent, gone = _powers(numbers, scale)
        fraction, turned = torch.zeros_like(exponent), torch.zeros_like(gone)
        by = ((top - 1) << 23).view(torch.float32)
    else:
        size = scale.float()
        part, exponent = torch.frexp(size.abs())  # part from a half on
        fraction, exponent = (part * 16 - 8).int(), exponent - 1 + NV_BY
        gone, turned = size == 0, size < 0
        by = (whole * 2.0 ** (29 - NV_BY)).float()
    kept = torch.where(gone | (exponent < LEAST), 0, exponent << 3 | fraction).to(torch.uint8)
    if bool((gone | turned).any()):
        spans = numbers.view(numbers.shape[0], -1, SPAN // 2)
        gone, turned = (_octets(each, spans.shape[1]) for each in (gone, turned))
        numbers = ((spans & ~(gone * 15)) ^ (turned * 8)).view(numbers.shape)
    return numbers, kept, by


def _powers(numbers: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """MXFP4's -> the largest power of a row of groups whose numbers aren't all 0 [N] int32, each group's exponent
    [N, groups] int32, and whether it has numbers that are lost."""
    some = (numbers.view(*scale.shape, SPAN // 2) & 0x77).amax(2) > 0
    power = scale.int()
    top = torch.where(some, power, 0).amax(1).clamp(min=2)  # below, `by` would be no normal number
    exponent = torch.where(some, MOST - top[:, None] + power, 0)
    return top, exponent, some & (exponent < LEAST)


def _octets(flags: Tensor, spans: int) -> Tensor:
    """Flags of groups [N, groups] -> of each 32 neighbours what holds for the numbers in its bytes' low halves, and 16
    times what does for those in the high ones, [N, spans, 1] uint8."""
    low_high = flags.view(len(flags), spans, -1).to(torch.uint8)
    return low_high[..., :1] | low_high[..., -1:] << 4
