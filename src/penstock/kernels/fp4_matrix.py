"""Layout of four-bit floats (MXFP4 and NVFP4) in memory. Loading makes it; products and experts
read it.

A number equals e2m1 * scale. The lower three bits of e2m1 choose a magnitude of E2M1, the fourth
bit is the sign. N outputs (rows of the matrix), K inputs.

  numbers   uint8 [N, K / 2], packed like four-bit integers (`kernels/int_matrix.py`)
  MXFP4     scale uint8 [N, K / 32]: 2 ** (byte - 127); 255 is NaN (OCP Microscaling Formats 1.0)
  NVFP4     scale e4m3 [N, K / 16], and whole float64 [N], the factor of a row's scales; the product
            is rounded to float32 (arXiv:2509.25149)

A checkpoint stores `whole` as a float32, by which scales are divided (compressed-tensors) or
multiplied (ModelOpt). In the first case `whole` here is the reciprocal in float64, and products are
rounded like the quotients: a quotient of a 4-bit by a 24-bit number has a relative distance of at
least 2 ** -49 from a float32 rounding boundary, and the reciprocal errs by 2 ** -52
(`docs/design/four_bit_floats.md`)."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.int_matrix import unpack_four

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes by the lower three bits of a number
E2M1_MOST = 6.0
NO_NUMBER = 255  # MXFP4's scale byte that means NaN


def widen_fp4(numbers: Tensor, scale: Tensor, whole: Tensor | None) -> Tensor:
    """Returns the matrix in float32 [N, K]. numbers, scale, whole (None: MXFP4): in this module's
    layout."""
    worth = torch.tensor((*E2M1, *(-each for each in E2M1)), device=numbers.device)
    each = worth[unpack_four(numbers).int()].unflatten(1, (scale.shape[1], -1))
    return each.mul_(scales_of(scale, whole)[..., None]).flatten(1)


def scales_of(scale: Tensor, whole: Tensor | None) -> Tensor:
    """Returns the factor by which each group's e2m1 numbers are multiplied, [N, groups] float32.
    scale, whole: in this module's layout."""
    if whole is None:
        return torch.exp2(scale.float() - 127)
    return (scale.double() * whole[:, None]).float()
