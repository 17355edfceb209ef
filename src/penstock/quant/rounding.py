"""Rounding by what a matrix is multiplied by: four bits whose products err less than those of the
nearest numbers.

    scales    of each group the one, between half and 1.1 times the usual, whose rounding costs the
    products least
    numbers   rounded one input after the other; what one loses is made good by those that are still
    to come, as far as
              the inputs go together (arXiv:2210.17323), the inputs that weigh most first

Layout and worth of the numbers are those of the nearest ones. It knows arrays; not where inputs
come from.
"""

from __future__ import annotations

import torch
from torch import Tensor

# of the scale with which nothing is cut off: 0.5 to 1.1
CLIPS = tuple(n / 20 for n in range(10, 23))
# of the middle moment, added to each: few inputs seen leave directions of which nothing is known
DAMPING = 0.01
AT_ONCE = 128  # inputs whose errors are carried on together


def nearest(groups: Tensor, scale: Tensor, bits: int) -> Tensor:
    """groups [out, groups, n], scale [out, groups] -> the nearest whole numbers [out, groups, n],
    in their dtype."""
    most = 2 ** (bits - 1)
    numbers: Tensor = (groups / scale[..., None].to(groups.dtype)).round_().clamp_(-most, most - 1)
    return numbers


def usual_scale(groups: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """groups [out, groups, n] -> scales [out,
    groups] with the same range on both sides of nothing."""
    scale: Tensor = (groups.abs().amax(2) / ((2**bits - 1) / 2)).to(dtype)
    return scale.masked_fill(scale == 0, torch.finfo(dtype).eps)


def search_scale(groups: Tensor, moments: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """groups [out, groups, n] float32, moments [groups, n]: each input's mean square -> scales
    [out, groups] of `dtype` whose nearest numbers lose least of the products."""
    usual, largest, half = usual_scale(groups, bits, dtype), groups.abs().amax(2), (2**bits - 1) / 2
    best, least = usual, torch.full_like(largest, torch.inf)
    # The usual one first: it stays where no other is better. Then those that put the largest number
    # on a whole one.
    for end in (half, half - 0.5, half + 0.5, *(half / clip for clip in CLIPS)):
        scale = (largest / end).to(dtype)
        scale = torch.where(scale == 0, usual, scale)
        lost = (
            nearest(groups, scale, bits)
            .mul_(scale.float()[..., None])
            .sub_(groups)
            .square_()
            .mul_(moments)
            .sum(2)
        )
        best, least = torch.where(lost < least, scale, best), torch.minimum(lost, least)
    return best


def round_to_products(
    matrix: Tensor, moments: Tensor, bits: int, group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """matrix [out, in] in a float dtype, moments [in, in] float32: the mean of x xT over inputs x
    -> numbers [out, in] int8 of so many bits and scales [out, in / group] of `dtype`, whose
    products of such inputs are near its own."""
    wide = matrix.float()
    own = moments.diagonal()
    scale = search_scale(wide.view(len(wide), -1, group), own.view(-1, group), bits, dtype)
    order = own.argsort(descending=True, stable=True)
    carried = _carried(moments[order][:, order])
    scales = scale.float().repeat_interleave(group, 1).T[order]
    left = wide.T[order]  # [in, out], what is to be rounded yet, with the errors of what was
    numbers, most = torch.empty_like(left), 2 ** (bits - 1)
    for first in range(0, len(left), AT_ONCE):
        end = min(first + AT_ONCE, len(left))
        errors = torch.empty(end - first, left.shape[1], device=left.device)
        for at in range(first, end):
            numbers[at] = (left[at] / scales[at]).round_().clamp_(-most, most - 1)
            error = errors[at - first] = (left[at] - numbers[at] * scales[at]) / carried[at, at]
            left[at:end].addr_(carried[at, at:end], error, alpha=-1)
        left[end:].addmm_(carried[first:end, end:].T, errors, alpha=-1)
    in_order = torch.empty_like(numbers, dtype=torch.int8)
    in_order[order] = numbers.to(torch.int8)
    return in_order.T.contiguous(), scale


def _carried(moments: Tensor) -> Tensor:
    """moments [in, in] in the order of rounding -> upper triangular [in, in]: row n says how much
    of input n's error each later input takes over. An input that was never seen takes part in
    nothing."""
    own = moments.diagonal()
    damped = moments + torch.diag(torch.where(own == 0, own.new_ones(()), own.mean() * DAMPING))
    factor: Tensor = torch.linalg.cholesky(
        torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True
    )
    return factor
