"""Products with weights that have a scale for each group of a row's numbers: integers of four and eight bits, and
float8 in blocks. Few rows by a kernel here that streams the weight once and widens it on its way to the tensor cores;
for many the weight is widened some of its outputs at a time, and multiplied by the library.

Rows come as they are, so that nothing of them is lost. It knows rows and a matrix; no layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.fp8_rows import TakesWideRows
from penstock.kernels.triton.pdl import has_pdl, release, wait
from penstock.kernels.triton.split import joined
from penstock.kernels.triton.widen import FLOAT8, FOUR, in_words, widen_eight, widen_four

MOST_STREAMED = 64  # rows
PROGRAMS = 800  # of two warps, about
WIDENED_AT_ONCE = 2**24  # numbers: 32 MB, which stay in the second-level cache until they are multiplied by
FP8_GROUP = 128


@triton.jit
def _group(turn, BK: tl.constexpr, GROUP: tl.constexpr):
    """Returns the group that a turn's numbers are of."""
    group = turn * 0
    if GROUP > 0:
        group = turn // (GROUP // BK)
    return group


@triton.jit(do_not_specialize=["M"])
def _linear_groups(
    x, weight, scale, zero, bias, out, parts, arrived, M, N, K, pitch, x_stride, each,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    ZEROS: tl.constexpr, SPLIT: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The product turned round, [outputs, rows]. A turn takes BK numbers of a row, which are of one group.
    each: a part's turns. pitch: bytes of a row of the weight. GATED: output n is silu(output n) * output n + N / 2;
    half of a program's outputs are gates, half what they let through."""
    release(EARLY)
    block, part = tl.program_id(0), tl.program_id(1)
    n = block * BN + tl.arange(0, BN)
    if GATED:
        of_half = tl.arange(0, BN)
        n = block * (BN // 2) + of_half % (BN // 2) + of_half // (BN // 2) * (N // 2)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    PACKED: tl.constexpr = 2 if KIND == FOUR else 1
    lane = tl.arange(0, BK // PACKED)
    k = lane // 4 * 8 + lane % 4 if KIND == FOUR else lane
    real_n = tl.minimum(n, N - 1)
    w_row = weight + real_n[:, None].to(tl.int64) * pitch + lane[None, :]
    x_row = x + m[:, None].to(tl.int64) * x_stride + k[None, :]
    real = (m < M)[:, None]
    first, end = part * each, tl.minimum(part * each + each, tl.cdiv(K, BK))
    wait(EARLY)
    sums = tl.zeros((BN, BM), tl.float32)
    for turn in tl.range(first, end, num_stages=STAGES):
        of_group = _group(turn, BK, GROUP) * N + real_n
        of = tl.load(scale + of_group)
        w_at, x_at = w_row + turn * (BK // PACKED), x_row + turn * BK
        if KIND == FOUR:
            w = tl.load(w_at)
            rows = tl.load(x_at, mask=real, other=0.0)
            more = tl.load(x_at + 4, mask=real, other=0.0)
            low, high = widen_four(w, x.dtype.element_ty)
            now = tl.dot(high, more.T, tl.dot(low, rows.T))
        else:
            if EVEN_K:
                w = tl.load(w_at)
                rows = tl.load(x_at, mask=real, other=0.0)
            else:
                inside = (turn * BK + lane < K)[None, :]
                w = tl.load(w_at, mask=inside, other=0)
                rows = tl.load(x_at, mask=real & inside, other=0.0)
            now = tl.dot(widen_eight(w, KIND, x.dtype.element_ty), rows.T)
        if ZEROS:
            ones = tl.full((BN, BK // PACKED), 1.0, x.dtype.element_ty)
            whole = tl.dot(ones, rows.T)
            if KIND == FOUR:
                whole = tl.dot(ones, more.T, whole)
            now -= (tl.load(zero + of_group) - (8.0 if KIND == FOUR else 0.0))[:, None] * whole
        sums += now * of[:, None]
    last = True
    if SPLIT > 1:
        sums, last = joined(sums, parts, arrived, block, part, SPLIT, BN, BM)
    if last:
        if HAS_BIAS:
            sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            kind = out.dtype.element_ty
            gate, up = tl.split(sums.to(kind).to(tl.float32).reshape(2, BN // 2, BM).permute(1, 2, 0))
            f = block * (BN // 2) + tl.arange(0, BN // 2)
            place = out + m[None, :].to(tl.int64) * (N // 2) + f[:, None]
            gated = (gate / (1.0 + tl.exp(-gate)) * up).to(kind)
            tl.store(place, gated, mask=(f < N // 2)[:, None] & (m < M)[None, :])
        else:
            place = out + m[None, :].to(tl.int64) * N + n[:, None]
            tl.store(place, sums.to(out.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


@dataclass(slots=True, frozen=True)
class Pieces:
    """How a product of few rows is cut into programs."""

    rows: int  # of a program
    outputs: int
    split: int  # programs along K
    stages: int
    warps: int


def pieces_of(m: int, n: int, k: int) -> Pieces:
    """Not measured yet; PROGRAMS are six a multiprocessor, and a part of K has at least four turns."""
    rows = 8 if m <= 8 else 16 if m <= 16 else 32 if m <= 32 else 64
    few = rows <= 16
    programs = triton.cdiv(n, 64) * triton.cdiv(m, rows) * (1 if few else 2)
    split = max(1, min(k // 512, round(PROGRAMS / programs))) if m <= rows else 1
    return Pieces(rows, 64, split, 4, 2 if few else 4)


@dataclass(slots=True, frozen=True)
class GroupMatrix(TakesWideRows):
    """A matrix [N, K] with a scale a group, and what its products leave for each other: calls must follow one another
    on one stream."""

    weight: Tensor  # bytes [N, K], of four bits [N, K / 2]
    scale: (
        Tensor  # [groups, N] float32, which is copied asynchronously beside the numbers (two bytes a thread can't be)
    )
    zero: Tensor | None  # [groups, N] float32
    kind: int
    shape: tuple[int, int]
    group: int  # 0: a row
    dtype: torch.dtype
    arrived: Tensor  # int32, zeros between calls

    @property
    def streamed(self) -> GroupMatrix:
        """What the fused operations of one row take."""
        return self

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)


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


def streamed_groups(
    x: Tensor, matrix: GroupMatrix, bias: Tensor | None = None, cut: Pieces | None = None, *, gated: bool = False
) -> Tensor:
    """The product by this file's kernel, whatever the number of rows. gated: of a matrix [2 F, K] (the gate's rows,
    then up's) silu(gate) * up, [T, F]."""
    (m, k), n, device = x.shape, matrix.shape[0], x.device
    out = torch.empty((m, n // 2 if gated else n), dtype=x.dtype, device=device)
    if not m:
        return out
    cut = cut or pieces_of(m, n, k)
    turn = _turn(matrix)
    turns = triton.cdiv(k, turn)
    each = triton.cdiv(turns, cut.split)
    splits, tiles = triton.cdiv(turns, each), triton.cdiv(n, cut.outputs)
    of_rows = triton.cdiv(m, cut.rows)
    parts = out
    if splits > 1:
        assert of_rows == 1, "a counter is of one tile of rows"
        parts = torch.empty(tiles * splits * cut.outputs * cut.rows, dtype=torch.float32, device=device)
    early = has_pdl(device)
    _linear_groups[(tiles, splits, of_rows)](
        x, matrix.weight, matrix.scale, x if matrix.zero is None else matrix.zero, x if bias is None else bias, out,
        parts, matrix.arrived, m, n, k, matrix.weight.shape[1], x.stride(0), each, BM=cut.rows,
        BN=cut.outputs, BK=turn, GROUP=matrix.group, KIND=matrix.kind, ZEROS=matrix.zero is not None, SPLIT=splits,
        GATED=gated, EVEN_K=k % turn == 0, HAS_BIAS=bias is not None, STAGES=cut.stages, EARLY=early,
        num_warps=cut.warps, launch_pdl=bool(early),
    )  # fmt: skip
    return out


def by_library(x: Tensor, matrix: GroupMatrix, bias: Tensor | None = None) -> Tensor:
    """The product by torch's, some of the outputs at a time: what they are widened into stays in the cache."""
    n, k = matrix.shape
    out = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    each = max(1, WIDENED_AT_ONCE // k)
    for first in range(0, n, each):
        wide = widened(matrix, first, min(each, n - first)).t()
        if bias is None:
            torch.mm(x, wide, out=out[:, first : first + each])
        else:
            torch.addmm(bias[first : first + each], x, wide, out=out[:, first : first + each])
    return out


@triton.jit(do_not_specialize=["first"])
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
    group = _group(tl.program_id(1), BK, GROUP)
    of = tl.load(scale + group * N + n)[:, None]
    if ZEROS:
        less = tl.load(zero + group * N + n)[:, None] - (8.0 if KIND == FOUR else 0.0)
    else:
        less = tl.zeros((BN, 1), tl.float32)
    kind = out.dtype.element_ty
    byte = at // PACKED + lane
    mask = there[:, None] & (byte < pitch)[None, :]
    w = tl.load(weight + n[:, None].to(tl.int64) * pitch + byte[None, :], mask=mask, other=0)
    to = out + row[:, None].to(tl.int64) * K + at
    if KIND == FOUR:
        low, high = widen_four(w, kind)
        k = (lane // 4 * 8 + lane % 4)[None, :]
        tl.store(to + k, ((low.to(tl.float32) - less) * of).to(kind), mask=mask)
        tl.store(to + k + 4, ((high.to(tl.float32) - less) * of).to(kind), mask=mask)
    else:
        tl.store(to + lane[None, :], ((widen_eight(w, KIND, kind).to(tl.float32) - less) * of).to(kind), mask=mask)


def widened(matrix: GroupMatrix, first: int, count: int) -> Tensor:
    """Returns what `count` of the matrix's rows are worth, [count, K] of its dtype."""
    n, k = matrix.shape
    turn, early = _turn(matrix), has_pdl(matrix.weight.device)
    out = torch.empty((count, k), dtype=matrix.dtype, device=matrix.weight.device)
    _widened[(triton.cdiv(count, 32), triton.cdiv(k, turn))](
        matrix.weight, matrix.scale, matrix.scale if matrix.zero is None else matrix.zero, out, first, count, n, k,
        matrix.weight.shape[1], GROUP=matrix.group, KIND=matrix.kind, ZEROS=matrix.zero is not None, BN=32, BK=turn,
        EARLY=early, num_warps=4, launch_pdl=bool(early),
    )  # fmt: skip
    return out


def _turn(matrix: GroupMatrix) -> int:
    """Returns the numbers of a row that a program takes at once: a power of two, at most 128, that divides a group, and
    of four bits a row, whose ends are not looked at."""
    size = matrix.group or (matrix.shape[1] if matrix.kind == FOUR.value else 128)
    return min(128, size & -size)
