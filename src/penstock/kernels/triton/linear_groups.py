"""Products with weights that have a scale for each group of a row's numbers: integers of four and eight bits, and
float8 in blocks. Few rows by the kernel of `stream_groups.py`; for many the weight is widened some of its outputs at a
time, and multiplied by the library. It knows rows and a matrix; no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.pdl import has_pdl, wait
from penstock.kernels.triton.stream_groups import GroupMatrix, group_of, streamed_groups, turn_of
from penstock.kernels.triton.widen import FLOAT8, FOUR, in_words, widen_eight, widen_four

MOST_STREAMED = 64  # rows
WIDENED_AT_ONCE = 2**24  # numbers: 32 MB, which stay in the second-level cache until they are multiplied by
FP8_GROUP = 128


def prepare_linear_int(numbers: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> GroupMatrix:
    """numbers, scale, zero in the layout of kernels/int_matrix.py, the model's dtype -> what `linear_int` takes."""
    four = numbers.dtype == torch.uint8
    shape = (numbers.shape[0], numbers.shape[1] * (2 if four else 1))
    group = 0 if scale.shape[1] == 1 else shape[1] // scale.shape[1]
    weight = in_words(numbers) if four else numbers.contiguous().view(torch.uint8)
    return _matrix(weight, scale, zero, FOUR.value if four else 8, shape, group, dtype)


def prepare_linear_fp8_groups(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> GroupMatrix:
    """weight [N, K] e4m3, scale [N, ceil(K / 128)] float32, the model's dtype -> what the product takes."""
    n, k = weight.shape
    return _matrix(weight.contiguous().view(torch.uint8), scale, None, FLOAT8.value, (n, k), FP8_GROUP, dtype)


def _matrix(
    weight: Tensor, scale: Tensor, zero: Tensor | None, kind: int, shape: tuple[int, int], group: int,
    dtype: torch.dtype,
) -> GroupMatrix:  # fmt: skip
    arrived = torch.zeros(triton.cdiv(shape[0], 16), dtype=torch.int32, device=weight.device)
    zero = None if zero is None else zero.float().t().contiguous()
    return GroupMatrix(weight, scale.float().t().contiguous(), zero, kind, shape, group, dtype, arrived)


def linear_int(
    x: Tensor, matrix: GroupMatrix, bias: Tensor | None = None, *, streamed_rows: int = MOST_STREAMED
) -> Tensor:
    """x [T, K] -> x @ ((numbers - zero) * scale).T + bias, [T, N]. The keyword: kernels/tunables.py."""
    if x.shape[0] <= streamed_rows:
        return streamed_groups(x, matrix, bias)
    return by_library(x, matrix, bias)


linear_fp8_groups = linear_int


def by_library(x: Tensor, matrix: GroupMatrix, bias: Tensor | None = None) -> Tensor:
    """The product by torch's, some of the outputs at a time: what they are widened into stays in the cache."""
    n, k = matrix.shape
    out = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    each = max(128, WIDENED_AT_ONCE // k // 128 * 128)
    for first in range(0, n, each):
        wide = widened(matrix, first, min(each, n - first)).t()
        if bias is None:
            torch.mm(x, wide, out=out[:, first : first + each])
        else:
            torch.addmm(bias[first : first + each], x, wide, out=out[:, first : first + each])
    return out


@triton.jit(do_not_specialize=["first", "count"])
def _widened(
    weight, scale, zero, out, first, count, N, K, pitch, GROUP: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    PACKED: tl.constexpr = 2 if KIND == FOUR else 1
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    there = row < count
    n = tl.minimum(first + row, N - 1)
    lane = tl.arange(0, BK // PACKED)
    at = tl.program_id(1) * BK
    group = group_of(tl.program_id(1), BK, GROUP)
    of = tl.load(scale + group * N + n)[:, None]
    less = tl.full((BN, 1), 8.0 if KIND == FOUR else 0.0, tl.float32)
    if ZEROS:
        less = tl.load(zero + group * N + n)[:, None]
    kind = out.dtype.element_ty
    byte = at // PACKED + lane
    mask = there[:, None] & (byte < pitch)[None, :]
    w = tl.load(weight + n[:, None].to(tl.int64) * pitch + byte[None, :], mask=mask, other=0)
    to = out + row[:, None].to(tl.int64) * K + at
    if KIND == FOUR:
        low, high = widen_four(w, less, kind)
        k = (lane // 4 * 8 + lane % 4)[None, :]
        tl.store(to + k, (low.to(tl.float32) * of).to(kind), mask=mask)
        tl.store(to + k + 4, (high.to(tl.float32) * of).to(kind), mask=mask)
    else:
        tl.store(to + lane[None, :], ((widen_eight(w, KIND, kind).to(tl.float32) - less) * of).to(kind), mask=mask)


def widened(matrix: GroupMatrix, first: int, count: int) -> Tensor:
    """Returns what `count` of the matrix's rows are worth, [count, K] of its dtype."""
    n, k = matrix.shape
    turn, early = min(turn_of(matrix), matrix.group or 128), has_pdl(matrix.weight.device)
    out = torch.empty((count, k), dtype=matrix.dtype, device=matrix.weight.device)
    _widened[(triton.cdiv(count, 32), triton.cdiv(k, turn))](
        matrix.weight, matrix.scale, matrix.scale if matrix.zero is None else matrix.zero, out, first, count, n, k,
        matrix.weight.shape[1], GROUP=matrix.group, KIND=matrix.kind, ZEROS=matrix.zero is not None, BN=32, BK=turn,
        EARLY=early, num_warps=4, launch_pdl=bool(early),
    )  # fmt: skip
    return out
