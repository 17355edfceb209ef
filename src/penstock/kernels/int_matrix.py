"""Layout of weights in four- and eight-bit integers in memory. Loading makes it, and products read
it.

A stored number means (number - zero) * scale, with one scale, and optionally one zero, for every
group of K / G neighbours. N outputs (rows of the matrix), K inputs, G groups of a row.

  8 bits   int8 [N, K], -128 to 127; without zeros the zero is 0
  4 bits   uint8 [N, K / 2], each byte two numbers of 0 to 15; without zeros the zero is 8
  scales   [N, G] in the model's dtype
  zeros    [N, G] in the model's dtype, which holds them exactly, or none

With four bits 16 bytes hold 32 neighbours along K: byte j has number j in its low half and 16 + j
in its high half.

  byte      0 1 15 | 16
  low half  k = 0 k = 1 ... k = 15 | k = 32 ...
  high half k = 16   k = 17 ... k = 31 | k = 48 ...

So a load of 16 bytes gives 32 neighbours of one group (groups are multiples of 32). The results of
`& 15` and `>> 4` belong to two contiguous runs of 16 inputs, so nothing has to be interleaved."""

from __future__ import annotations

from torch import Tensor, stack

SPAN = 32  # neighbours packed together
ZERO_OF_FOUR = 8  # the zero of four-bit numbers without stored zeros


def pack_four(numbers: Tensor) -> Tensor:
    """Packs numbers [N, K] uint8 of 0 to 15, K a multiple of 32, into [N, K / 2] uint8."""
    rows, into = numbers.shape
    low, high = numbers.view(rows, into // SPAN, 2, SPAN // 2).unbind(2)
    return (low | high << 4).view(rows, into // 2)


def unpack_four(packed: Tensor) -> Tensor:
    """Unpacks [N, K / 2] uint8 into numbers [N, K] uint8 of 0 to 15."""
    rows, half = packed.shape
    spans = packed.view(rows, half // (SPAN // 2), SPAN // 2)
    return stack((spans & 15, spans >> 4), 2).view(rows, 2 * half)
