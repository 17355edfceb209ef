"""Scales of four-bit floats for kernels: one form for NVFP4 and MXFP4, a byte a group and a float32
a row.

  a number = e2m1 * (1 + (byte & 7) / 8) * 2 ** ((byte >> 3) - 29) * by[row]

A byte has five bits of exponent and three of fraction. It can hold any positive e4m3, always with a
leading one, so that a kernel makes a float of it by a shift, in bfloat16, float16 and float32
alike. Zero and negative scales are moved into the numbers. A row of MXFP4 counts from its largest
power; groups 2 ** 25 times smaller become 0, which float32 could not add to the others either.
Knows tensors; no kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.int_matrix import SPAN

# exponents: 31 is infinity in float16; half of LEAST's value is no float16
MOST, LEAST = (
    30,
    6,
)
NV_BY = 22  # maps an e4m3's exponent 8 to 30


UNIT = 16  # groups of 16 whose scales are adjacent


def in_pairs(short: Tensor, k: int, turn: int = SPAN // 2) -> Tensor:
    """Returns int16 [..., ceil(K / 256), N, 8]: a pair holds, for 16 bytes of numbers, the scale of
    their low halves and that of their high halves. short: bytes [..., N, groups] of rows of K
    numbers. turn: 2 * turn neighbours lie in the halves of `turn` bytes. Scales of 256 neighbours
    are adjacent, so that both few outputs of long rows and many outputs of short ranges are read in
    whole sectors."""
    each = short.repeat_interleave(k // 16 // short.shape[-1], -1)
    each = each.unflatten(-1, (-1, 2, turn // 16)).transpose(-1, -2).flatten(-3)
    units = F.pad(each, (0, -each.shape[-1] % UNIT)).unflatten(-1, (-1, UNIT))
    return units.transpose(-3, -2).contiguous().view(torch.int16)


def in_words(short: Tensor) -> Tensor:
    """Returns int32 [..., ceil(K / 128), N]: four scales of an output in a word, words of outputs
    adjacent. short: MXFP4's scales, bytes [..., N, K / 32]."""
    words = F.pad(short, (0, -short.shape[-1] % 4)).view(torch.int32)
    return words.mT.contiguous()


def short_scales(
    numbers: Tensor, scale: Tensor, whole: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns numbers [N, K / 2] (the given ones unless scales were moved into them), bytes [N,
    groups] and by [N] float32. numbers, scale, whole: in the layout of kernels/fp4_matrix.py."""
    if whole is None:
        top, exponent, gone = _powers(numbers, scale)
        fraction, turned = torch.zeros_like(exponent), torch.zeros_like(gone)
        by = ((top - 1) << 23).view(torch.float32)
    else:
        size = scale.float()
        part, exponent = torch.frexp(size.abs())  # part is at least a half
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
    """Returns for MXFP4 the largest power among a row's groups that are not all 0 [N] int32, each
    group's exponent [N, groups] int32, and a mask of groups whose numbers are lost."""
    some = (numbers.view(*scale.shape, SPAN // 2) & 0x77).amax(2) > 0
    power = scale.int()
    top = torch.where(some, power, 0).amax(1).clamp(min=2)  # below 2, `by` would be subnormal
    exponent = torch.where(some, MOST - top[:, None] + power, 0)
    return top, exponent, some & (exponent < LEAST)


def _octets(flags: Tensor, spans: int) -> Tensor:
    """Expands flags of groups [N, groups] to 32 neighbours each: the flag of the bytes' low halves
    + 16 * that of the high halves, [N, spans, 1] uint8."""
    low_high = flags.view(len(flags), spans, -1).to(torch.uint8)
    return low_high[..., :1] | low_high[..., -1:] << 4
