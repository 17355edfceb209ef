"""Products of few rows with weights that have a scale for each group of a row's numbers: the weight is streamed once,
and widened on its way to the tensor cores. Rows come as they are, so that nothing of them is lost; what stands behind
the product of a layer's gate and up may be done with the sums at once.

It knows rows and a matrix; no layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.fp8_rows import TakesWideRows
from penstock.kernels.triton.pdl import fetch, has_pdl, release, wait
from penstock.kernels.triton.split import joined
from penstock.kernels.triton.widen import FOUR, widen_eight, widen_four

PROGRAMS = 800  # of two warps, about


@triton.jit
def group_of(turn, BK: tl.constexpr, GROUP: tl.constexpr):
    """Returns the group that a turn's numbers are of."""
    group = turn * 0
    if GROUP > 0:
        group = turn // (GROUP // BK)
    return group


@triton.jit(do_not_specialize=["M"])
def _stream(
    x, weight, scale, zero, bias, out, parts, arrived, M, N, K, pitch, x_stride, each,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    ZEROS: tl.constexpr, SPLIT: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The product turned round, [outputs, rows]. A turn takes BK numbers of a row, which are of one group,
    or of two, for which the row is read twice with a half of it zeros.
    each: a part's turns. pitch: bytes of a row of the weight.

    GATED: output n is silu(n) * (n + N / 2), which have a half of a program's each."""
    release(EARLY)
    block, part = tl.program_id(0), tl.program_id(1)
    n = block * BN + tl.arange(0, BN)
    if GATED:
        n = block * (BN // 2) + tl.arange(0, BN) % (BN // 2) + tl.arange(0, BN) // (BN // 2) * (N // 2)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    PACKED: tl.constexpr = 2 if KIND == FOUR else 1
    lane = tl.arange(0, BK // PACKED)
    k = lane // 4 * 8 + lane % 4 if KIND == FOUR else lane
    real_n = tl.minimum(n, N - 1)
    w_row = weight + real_n[:, None].to(tl.int64) * pitch + lane[None, :]
    x_row = x + m[:, None].to(tl.int64) * x_stride + k[None, :]
    real = (m < M)[:, None]
    first, end = part * each, tl.minimum(part * each + each, tl.cdiv(K, BK))
    if EARLY > 0:
        for turn in tl.static_range(AHEAD):
            fetch(weight + real_n.to(tl.int64) * pitch + tl.minimum(first + turn, end - 1) * (BK // PACKED))
    wait(EARLY)
    sums = tl.zeros((BN, BM), tl.float32)
    GROUPS: tl.constexpr = 1 if GROUP == 0 or GROUP >= BK else BK // GROUP  # of a turn
    for turn in tl.range(first, end, num_stages=STAGES):
        w_at, x_at = w_row + turn * (BK // PACKED), x_row + turn * BK
        inside = lane >= 0 if EVEN_K else turn * BK + lane < K
        w = tl.load(w_at) if EVEN_K else tl.load(w_at, mask=inside[None, :], other=0)
        for at in tl.static_range(GROUPS):
            mine = inside if GROUPS == 1 else lane // (GROUP // PACKED) == at
            of_group = (group_of(turn, BK, GROUP) if GROUPS == 1 else turn * GROUPS + at) * N + real_n
            of = tl.load(scale + of_group)
            less = tl.full((BN,), 8.0 if KIND == FOUR else 0.0, tl.float32)
            if ZEROS:
                less = tl.load(zero + of_group)
            held = real if EVEN_K and GROUPS == 1 else real & mine[None, :]
            rows = tl.load(x_at, mask=held, other=0.0)
            if KIND == FOUR:
                more = tl.load(x_at + 4, mask=held, other=0.0)
                low, high = widen_four(w, less[:, None], x.dtype.element_ty)
                now = tl.dot(high, more.T, tl.dot(low, rows.T))
            else:
                numbers = widen_eight(w, KIND, x.dtype.element_ty)
                if ZEROS:
                    numbers -= less[:, None].to(x.dtype.element_ty)
                now = tl.dot(numbers, rows.T)
            sums += now * of[:, None]
    last = True
    if SPLIT > 1:
        sums, last = joined(sums, parts, arrived, block, part, SPLIT, BN, BM)
    if last:
        if HAS_BIAS:
            sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            kind = out.dtype.element_ty
            a, b = tl.split(sums.to(kind).to(tl.float32).reshape(2, BN // 2, BM).permute(1, 2, 0))
            own = (block * (BN // 2) + tl.arange(0, BN // 2))[:, None]
            there = (own < N // 2) & (m < M)[None, :]
            to = out + m[None, :].to(tl.int64) * (N // 2) + own
            tl.store(to, (a / (1.0 + tl.exp(-a)) * b).to(kind), mask=there)
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
    ahead: int = 0  # turns whose weights are asked for before the kernel ahead has ended


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


def turn_of(matrix: GroupMatrix) -> int:
    """Returns the numbers of a row that a program takes at once: a power of two, at most 128, that divides a group, and
    of four bits a row, whose ends are not looked at. 32 numbers of four bits can't be copied asynchronously: it is 64
    then, of two groups."""
    size = matrix.group or (matrix.shape[1] if matrix.kind == FOUR.value else 128)
    if matrix.kind == FOUR.value and matrix.group == 32 and matrix.shape[1] % 64 == 0:
        return 64
    return min(128, size & -size)


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
    turn = turn_of(matrix)
    turns = triton.cdiv(k, turn)
    each = triton.cdiv(turns, cut.split)
    splits, tiles = triton.cdiv(turns, each), triton.cdiv(n, cut.outputs)
    of_rows = triton.cdiv(m, cut.rows)
    parts = out
    if splits > 1:
        assert of_rows == 1, "a counter is of one tile of rows"
        parts = torch.empty(tiles * splits * cut.outputs * cut.rows, dtype=torch.float32, device=device)
    early = has_pdl(device)
    _stream[(tiles, splits, of_rows)](
        x, matrix.weight, matrix.scale, x if matrix.zero is None else matrix.zero, x if bias is None else bias, out,
        parts, matrix.arrived, m, n, k, matrix.weight.shape[1], x.stride(0), each, BM=cut.rows, BN=cut.outputs, BK=turn,
        GROUP=matrix.group, KIND=matrix.kind, ZEROS=matrix.zero is not None, SPLIT=splits, GATED=gated,
        EVEN_K=k % turn == 0, HAS_BIAS=bias is not None, STAGES=cut.stages, AHEAD=cut.ahead, EARLY=early,
        num_warps=cut.warps, launch_pdl=bool(early),
    )  # fmt: skip
    return out
