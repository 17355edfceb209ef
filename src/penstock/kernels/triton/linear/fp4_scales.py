"""Scales of four-bit floats in the format that the kernels read. NVFP4 and MXFP4 have the same
format here: one byte for each scale group, and one float32 factor `by` for each row of the matrix.

  number = e2m1 * (1 + (byte & 7) / 8) * 2 ** ((byte >> 3) - 29) * by[row]

A byte has five bits of exponent and three of fraction. It can hold any positive e4m3 as a normal
number, so a kernel converts it to bfloat16, float16 or float32 by one shift. Zero and negative
scales don't exist in this format: their group's e2m1 numbers are set to 0 or negated instead. For
MXFP4, exponents are relative to the row's largest scale. Groups whose scale is more than 2 ** 24
times smaller become 0; a float32 sum would lose them anyway. N: rows of the matrix (outputs), K:
inputs. Knows tensors; no kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.int_matrix import SPAN

# Range of a scale byte's exponent. 31 would be infinity in float16. With LEAST, 0.5 (the smallest
# e2m1 number) times the scale is 2 ** -24, float16's smallest number.
MOST, LEAST = (
    30,
    6,
)
NV_BY = 22  # added to an e4m3's exponent, so that its largest, 8, becomes 30


UNIT = 16  # scales that are adjacent in memory: those of 16 groups of 16 inputs


def in_pairs(short: Tensor, k: int, turn: int = SPAN // 2) -> Tensor:
    """Returns the scales in pairs, int16 [..., ceil(K / 256), N, 8]. A pair belongs to 16 bytes of
    packed weights: its low byte is the scale of their low nibbles, its high byte that of their high
    nibbles.

    short: scale bytes [..., N, groups]. k: K. turn: how the weights are packed: of each 2 * turn
    inputs the first `turn` are the low nibbles of `turn` bytes, the others their high nibbles. The
    8 pairs of 256 inputs are adjacent. So memory is read in whole 32-byte sectors both by programs
    with few outputs and many inputs and by programs with many outputs and few inputs."""
    each = short.repeat_interleave(k // 16 // short.shape[-1], -1)
    each = each.unflatten(-1, (-1, 2, turn // 16)).transpose(-1, -2).flatten(-3)
    units = F.pad(each, (0, -each.shape[-1] % UNIT)).unflatten(-1, (-1, UNIT))
    return units.transpose(-3, -2).contiguous().view(torch.int16)


def in_words(short: Tensor) -> Tensor:
    """Returns MXFP4's scales as int32 words, [..., ceil(K / 128), N]. A word has the four scales of
    one output for 128 inputs; words of neighbouring outputs are adjacent. short: scale bytes [...,
    N, K / 32]."""
    words = F.pad(short, (0, -short.shape[-1] % 4)).view(torch.int32)
    return words.mT.contiguous()


def short_scales(
    numbers: Tensor, scale: Tensor, whole: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Converts a matrix to this module's format. Returns the packed weights uint8 [N, K / 2], the
    scale bytes uint8 [N, groups], and `by` float32 [N]. numbers, scale, whole: in the layout of
    kernels/fp4_matrix.py. The returned weights are `numbers` itself unless some scale is zero,
    negative or too small."""
    if whole is None:
        top, exponent, gone = _powers(numbers, scale)
        fraction, turned = torch.zeros_like(exponent), torch.zeros_like(gone)
        by = ((top - 1) << 23).view(torch.float32)
    else:
        size = scale.float()
        part, exponent = torch.frexp(size.abs())  # part is 0.5 or more and below 1
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
    """Computes the exponents of MXFP4's scales. numbers: packed weights [N, K / 2]. scale: bytes
    [N, K / 32]. Returns the largest scale exponent of each row, [N] int32 (groups of zeros don't
    count); the exponent of each group in this module's format, [N, groups] int32; and a bool mask
    [N, groups] of the groups whose scale is too small for the format."""
    some = (numbers.view(*scale.shape, SPAN // 2) & 0x77).amax(2) > 0
    power = scale.int()
    top = torch.where(some, power, 0).amax(1).clamp(min=2)  # below 2, `by` would be subnormal
    exponent = torch.where(some, MOST - top[:, None] + power, 0)
    return top, exponent, some & (exponent < LEAST)


def _octets(flags: Tensor, spans: int) -> Tensor:
    """Expands a bool flag per group, [N, groups], to a byte per 32 inputs, [N, spans, 1] uint8. Bit
    0 is the flag of the inputs in low nibbles, bit 4 that of the inputs in high nibbles. spans: K /
    32."""
    low_high = flags.view(len(flags), spans, -1).to(torch.uint8)
    return low_high[..., :1] | low_high[..., -1:] << 4
