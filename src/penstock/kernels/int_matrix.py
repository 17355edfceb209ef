"""Layout of four- and eight-bit integer weights in memory. Loading writes it, and products read it.

A stored number means (number - zero point) * scale. A row has G groups of K / G neighbouring
inputs; each has one scale and, in asymmetric quantization, one zero point. N: outputs (rows of the
matrix), K: inputs.

  8 bits        int8 [N, K], -128 to 127; in symmetric quantization the zero point is 0
  4 bits        uint8 [N, K / 2], two numbers of 0 to 15 per byte; in symmetric quantization the
                zero point is 8
  scales        [N, G] in the model's dtype
  zero points   [N, G] in the model's dtype, which holds them exactly; None: symmetric

With four bits, 16 bytes hold 32 neighbouring inputs: byte j has input j in its low nibble and input
16 + j in its high nibble.

  byte          0        1        ...   15       16       ...
  low nibble    k = 0    k = 1    ...   k = 15   k = 32   ...
  high nibble   k = 16   k = 17   ...   k = 31   k = 48   ...

So a load of 16 bytes gives 32 neighbours of one group (groups are multiples of 32). The results of
`& 15` and `>> 4` belong to two contiguous runs of 16 inputs, so nothing has to be interleaved."""

from __future__ import annotations

from torch import Tensor, stack

SPAN = 32  # neighbouring inputs that are packed together
ZERO_OF_FOUR = 8  # zero point of four-bit numbers in symmetric quantization


def pack_four(numbers: Tensor) -> Tensor:
    """Packs numbers of 0 to 15, uint8 [N, K] with K a multiple of 32, two to a byte: uint8 [N, K /
    2] in this module's layout."""
    rows, into = numbers.shape
    low, high = numbers.view(rows, into // SPAN, 2, SPAN // 2).unbind(2)
    return (low | high << 4).view(rows, into // 2)


def unpack_four(packed: Tensor) -> Tensor:
    """Unpacks uint8 [N, K / 2] of this module's layout into numbers of 0 to 15, uint8 [N, K]."""
    rows, half = packed.shape
    spans = packed.view(rows, half // (SPAN // 2), SPAN // 2)
    return stack((spans & 15, spans >> 4), 2).view(rows, 2 * half)
