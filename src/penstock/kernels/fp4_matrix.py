"""Four-bit floats in memory: the one layout of MXFP4 and NVFP4 that loading makes and products and
experts take.

A number equals e2m1 * scale: three bits choose a magnitude of E2M1, the fourth is the sign.

  numbers   uint8 [N, K / 2], packed like four-bit integers (`kernels/int_matrix.py`)
  MXFP4     scale uint8 [N, K / 32]: 2 ** (byte - 127); 255 is NaN (OCP Microscaling Formats 1.0)
  NVFP4     scale e4m3 [N, K / 16], and whole float64 [N], the factor of a row's scales; the product
            is rounded to float32 (arXiv:2509.25149)

A checkpoint gives `whole` as a float32 that divides (compressed-tensors) or multiplies (ModelOpt).
Its reciprocal in float64 is exact enough: scale / whole, of 4 bits by 24, is at least 2 ** -49 of
itself away from a float32 rounding boundary, and the reciprocal errs by 2 ** -52
(`docs/design/four_bit_floats.md`)."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.int_matrix import unpack_four

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes by the lower three bits of a number
E2M1_MOST = 6.0
NO_NUMBER = 255  # MXFP4's scale byte that means NaN


def widen_fp4(numbers: Tensor, scale: Tensor, whole: Tensor | None) -> Tensor:
    """Returns the numbers in float32 [N, K]. numbers, scale, whole (None: MXFP4): in the layout
    above."""
    worth = torch.tensor((*E2M1, *(-each for each in E2M1)), device=numbers.device)
    each = worth[unpack_four(numbers).int()].unflatten(1, (scale.shape[1], -1))
    return each.mul_(scales_of(scale, whole)[..., None]).flatten(1)


def scales_of(scale: Tensor, whole: Tensor | None) -> Tensor:
    """Returns the factor of each group's numbers, [N, groups] float32."""
    if whole is None:
        return torch.exp2(scale.float() - 127)
    return (scale.double() * whole[:, None]).float()
