"""Layout of four-bit floats (MXFP4 and NVFP4) in memory. Loading writes it; products and expert
operations read it.

A number equals e2m1 * scale. The lower three bits of an e2m1 select one of eight magnitudes (E2M1),
the fourth bit is the sign. N: outputs (rows of the matrix), K: inputs.

  numbers   uint8 [N, K / 2], packed like four-bit integers (`kernels/int_matrix.py`)
  MXFP4     scale uint8 [N, K / 32]: 2 ** (byte - 127); 255 is NaN (OCP Microscaling Formats 1.0)
  NVFP4     scale e4m3 [N, K / 16], and whole float64 [N], the factor of a row's scales; scale *
            whole is rounded to float32 (arXiv:2509.25149)

A checkpoint stores the global scale as a float32. Group scales are divided by it
(compressed-tensors) or multiplied (ModelOpt). In the first case `whole` is its reciprocal in
float64. scale * whole, rounded to float32, then equals the quotient rounded to float32: a quotient
of a 4-bit by a 24-bit number has a relative distance of at least 2 ** -49 from a rounding boundary,
and the reciprocal's relative error is 2 ** -52 (`docs/design/four_bit_floats.md`)."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.int_matrix import unpack_four

# the magnitudes that the lower three bits of a number select
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MOST = 6.0
NO_NUMBER = 255  # MXFP4's scale byte that means NaN


def widen_fp4(numbers: Tensor, scale: Tensor, whole: Tensor | None) -> Tensor:
    """Returns the matrix as float32 [N, K]. numbers, scale, whole: in this module's layout; whole
    None: MXFP4."""
    worth = torch.tensor((*E2M1, *(-each for each in E2M1)), device=numbers.device)
    each = worth[unpack_four(numbers).int()].unflatten(1, (scale.shape[1], -1))
    return each.mul_(scales_of(scale, whole)[..., None]).flatten(1)


def scales_of(scale: Tensor, whole: Tensor | None) -> Tensor:
    """Returns the float32 scale of each group of e2m1 numbers, [N, groups]. scale, whole: in this
    module's layout; whole None: MXFP4."""
    if whole is None:
        return torch.exp2(scale.float() - 127)
    return (scale.double() * whole[:, None]).float()
