"""Products with weights that have group scales. These are int4 and int8 weights, and float8 weights
with a scale for each block of 128 x 128. Up to 256 rows are multiplied by the kernel of
`stream_groups.py`. For more rows, the weights of some outputs at a time are widened to the model's
dtype and multiplied by cuBLAS. T: rows of x, N: outputs, K: inputs. Knows rows and a matrix; no
layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.fixed_row import FixedRow
from penstock.kernels.fp8_rows import FP8_GROUP, Rows, wide
from penstock.kernels.triton.grid import cdiv
from penstock.kernels.triton.linear.linear_four import fits_lone, lone_product
from penstock.kernels.triton.linear.stream_groups import (
    GroupMatrix,
    group_of,
    streamed_groups,
    turn_of,
    zero_of,
)
from penstock.kernels.triton.linear.widen import FLOAT8, FOUR, in_halves, widen_eight, widen_four
from penstock.kernels.triton.pdl import has_pdl, wait

# the most rows for stream_groups.py: with 256 rows the four int4 products of an 8B model take 336
# us with it, and 357 us with widened weights and cuBLAS
MOST_STREAMED = 256
# weights that are widened at once: 32 MB, which stay in the L2 cache until they are multiplied
WIDENED_AT_ONCE = 2**24


def prepare_linear_int(
    numbers: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype
) -> GroupMatrix:
    """Prepares an integer matrix for `linear_int`. numbers, scale, zero: in the layout of
    kernels/int_matrix.py; zero None: symmetric quantization. dtype: the model's."""
    four = numbers.dtype == torch.uint8
    shape = (numbers.shape[0], numbers.shape[1] * (2 if four else 1))
    group = 0 if scale.shape[1] == 1 else shape[1] // scale.shape[1]
    kind = FOUR.value if four else 8
    weight = (
        in_halves(numbers, turn_of(kind, shape[1], group))
        if four
        else numbers.contiguous().view(torch.uint8)
    )
    lone = None
    if four and zero is None and fits_lone(shape[1], group, scale.shape[1]):
        lone = scale.to(dtype).contiguous()
    return _matrix(weight, scale, zero, kind, shape, group, dtype, lone)


def prepare_linear_fp8_groups(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> GroupMatrix:
    """Prepares a float8 matrix with group scales for `linear_fp8_groups`. weight: [N, K] e4m3.
    scale: [N, ceil(K / 128)] float32. dtype: the model's."""
    n, k = weight.shape
    return _matrix(
        weight.contiguous().view(torch.uint8), scale, None, FLOAT8.value, (n, k), FP8_GROUP, dtype
    )


def _matrix(
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    kind: int,
    shape: tuple[int, int],
    group: int,
    dtype: torch.dtype,
    lone: Tensor | None = None,
) -> GroupMatrix:
    """Makes a GroupMatrix, with its scales and zero points transposed to [groups, N] float32.
    Parameters: see its fields; scale, zero: [N, groups]."""
    # enough counters for products of up to 512 rows
    arrived = torch.zeros(8 * cdiv(shape[0], 32), dtype=torch.int32, device=weight.device)
    zero = None if zero is None else zero.float().t().contiguous()
    return GroupMatrix(
        weight, scale.float().t().contiguous(), zero, kind, shape, group, dtype, arrived, lone
    )


def linear_int(
    x: Rows, matrix: GroupMatrix, bias: Tensor | None = None, *, streamed_rows: int = MOST_STREAMED
) -> Tensor:
    """Returns x @ ((numbers - zero) * scale).T + bias, [T, N]. x: [T, K] in the model's dtype; if T
    = 1, in the representation that `matrix.form(1)` gives. streamed_rows: the most rows for
    `stream_groups.py`, see kernels/tunables.py."""
    if isinstance(x, FixedRow):
        return wide(lone_product(x, matrix, bias))
    x = wide(x)
    assert matrix.form(x.shape[0]) == "wide", "a row that the matrix wants in fixed point"
    if x.shape[0] <= streamed_rows:
        return streamed_groups(x, matrix, bias)
    return by_library(x, matrix.shape, partial(widened, matrix), bias)


linear_fp8_groups = linear_int


def by_library(
    x: Tensor,
    shape: tuple[int, int],
    widen: Callable[[int, int], Tensor],
    bias: Tensor | None = None,
) -> Tensor:
    """Returns x @ matrix.T + bias by cuBLAS, some outputs at a time, so that their widened weights
    stay in the L2 cache. shape: (N, K) of the matrix. widen: function (first row, number of rows)
    -> these rows of the matrix in the model's dtype."""
    n, k = shape
    out = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    each = max(128, WIDENED_AT_ONCE // k // 128 * 128)
    for first in range(0, n, each):
        wide = widen(first, min(each, n - first)).t()
        if bias is None:
            torch.mm(x, wide, out=out[:, first : first + each])
        else:
            torch.addmm(bias[first : first + each], x, wide, out=out[:, first : first + each])
    return out


@triton.jit(do_not_specialize=["first", "count"])
def _widened(
    weight,
    scale,
    zero,
    out,
    first,
    count,
    N,
    K,
    pitch,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Kernel of `widened`. A program widens BK bytes of each of BN rows. weight, scale, zero:
    fields of GroupMatrix. out: [count, K]. pitch: bytes of a row of packed weights. GROUP, KIND,
    ZEROS: as in `stream_groups._stream`. EARLY: see pdl.py."""
    wait(EARLY)
    HALVES: tl.constexpr = 2 if KIND == FOUR else 1
    row, turn = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1)
    n = tl.minimum(first + row, N - 1)
    byte = turn * BK + tl.arange(0, BK)
    mask = (row < count)[:, None] & (byte < pitch)[None, :]
    w = tl.load(weight + n[:, None].to(tl.int64) * pitch + byte[None, :], mask=mask, other=0)
    at = group_of(turn * HALVES, BK, GROUP) * N + n
    of, less = tl.load(scale + at)[:, None], zero_of(zero, at, KIND, ZEROS, BN)
    kind = out.dtype.element_ty
    to = out + row[:, None].to(tl.int64) * K + (turn * HALVES * BK + tl.arange(0, BK))[None, :]
    if KIND == FOUR:
        at = group_of(turn * 2 + 1, BK, GROUP) * N + n
        low, high = widen_four(w, less, zero_of(zero, at, KIND, ZEROS, BN), kind)
        tl.store(to, (low.to(tl.float32) * of).to(kind), mask=mask)
        tl.store(to + BK, (high.to(tl.float32) * tl.load(scale + at)[:, None]).to(kind), mask=mask)
    else:
        tl.store(to, ((widen_eight(w, KIND, kind).to(tl.float32) - less) * of).to(kind), mask=mask)


def widened(matrix: GroupMatrix, first: int, count: int) -> Tensor:
    """Returns `count` rows of the matrix, from row `first` on, as numbers of the model's dtype:
    [count, K]."""
    n, k = matrix.shape
    turn, early = turn_of(matrix.kind, k, matrix.group), has_pdl(matrix.weight.device)
    pitch = matrix.weight.shape[1]
    out = torch.empty((count, k), dtype=matrix.dtype, device=matrix.weight.device)
    _widened[(cdiv(count, 32), cdiv(pitch, turn))](
        matrix.weight,
        matrix.scale,
        matrix.scale if matrix.zero is None else matrix.zero,
        out,
        first,
        count,
        n,
        k,
        pitch,
        GROUP=matrix.group,
        KIND=matrix.kind,
        ZEROS=matrix.zero is not None,
        BN=32,
        BK=turn,
        EARLY=early,
        num_warps=4,
        launch_pdl=bool(early),
    )
    return out
