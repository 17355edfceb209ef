"""Rounds matrices to four bits with the help of calibration inputs. The product with a matrix then
has a smaller error than with rounding to nearest.

  scales    for each group, tries scales between half and 1.1 times the usual one and takes the one
            with the smallest error of products
  numbers   are rounded input by input, those with the largest mean square first; each rounding
            error is compensated in correlated inputs that are not rounded yet (GPTQ,
            arXiv:2210.17323)

The result is stored in the same format as with rounding to nearest. Knows arrays; not where
calibration inputs come from."""

from __future__ import annotations

import torch
from torch import Tensor

# candidate scales, relative to the smallest one that clips nothing: 0.5 to 1.1
CLIPS = tuple(n / 20 for n in range(10, 23))
# `moments` may be singular if there were few calibration inputs. So this share of its diagonal's
# mean is added to the diagonal.
DAMPING = 0.01
AT_ONCE = 128  # inputs after which accumulated errors are applied to all later inputs


def nearest(groups: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Divides groups [out, groups, n] by scale [out, groups] and rounds to integers of `bits` bits,
    in the dtype of `groups`. n: inputs of a group."""
    most = 2 ** (bits - 1)
    numbers: Tensor = (groups / scale[..., None].to(groups.dtype)).round_().clamp_(-most, most - 1)
    return numbers


def usual_scale(groups: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Returns the smallest scales [out, groups], of `dtype`, that clip no number of groups [out,
    groups, n]."""
    scale: Tensor = (groups.abs().amax(2) / ((2**bits - 1) / 2)).to(dtype)
    return scale.masked_fill(scale == 0, torch.finfo(dtype).eps)


def search_scale(groups: Tensor, moments: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Returns for each group the scale with which rounding to nearest changes products least, [out,
    groups] of `dtype`. groups: [out, groups, n] float32. moments: mean square of each input,
    [groups, n]."""
    usual, largest, half = usual_scale(groups, bits, dtype), groups.abs().amax(2), (2**bits - 1) / 2
    best, least = usual, torch.full_like(largest, torch.inf)
    # The usual scale is tried first, and kept unless another is better. With the next two scales,
    # the group's largest number becomes an integer exactly.
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
    """Quantizes matrix [out, in], of a float dtype, so that products with it change little. Returns
    integers [out, in] int8 in the range of `bits` bits, and scales [out, in / group] of `dtype`.

    moments: [in, in] float32, the mean of x x^T over the calibration inputs x. group: inputs that
    share a scale."""
    wide = matrix.float()
    own = moments.diagonal()
    scale = search_scale(wide.view(len(wide), -1, group), own.view(-1, group), bits, dtype)
    order = own.argsort(descending=True, stable=True)
    carried = _carried(moments[order][:, order])
    scales = scale.float().repeat_interleave(group, 1).T[order]
    # [in, out]: the numbers to round, to which compensation for the errors of earlier inputs is
    # added
    left = wide.T[order]
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
    """Returns an upper triangular matrix [in, in]. Row n has the factors by which input n's
    rounding error is added to each later input. moments: mean of x x^T [in, in], with inputs in the
    order of rounding. An input that is always 0 gets factors of 0."""
    own = moments.diagonal()
    damped = moments + torch.diag(torch.where(own == 0, own.new_ones(()), own.mean() * DAMPING))
    factor: Tensor = torch.linalg.cholesky(
        torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True
    )
    return factor
