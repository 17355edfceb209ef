"""Products of few rows with weights that have group scales (int4, int8, float8). The weight is read
once; a program widens it in registers for tensor cores. Rows are not quantized. For the product
with gate and up, silu(gate) * up may be computed in the same launch.

M: rows of x, N: outputs, K: inputs. A turn is an iteration along K: it loads BK bytes of packed
weights of each output. With int4 these are 2 * BK inputs. Knows rows and a matrix; no layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.fp8_rows import Form, TakesWideRows
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.linear.split import joined, split_launch
from penstock.kernels.triton.linear.widen import FOUR, widen_eight, widen_four
from penstock.kernels.triton.pdl import fetch, has_pdl, release_late, wait


@triton.jit
def group_of(turn, BK: tl.constexpr, GROUP: tl.constexpr):
    """Returns the index of the scale group of inputs turn * BK to turn * BK + BK - 1. GROUP: inputs
    of a group; 0: one group for the whole row."""
    group = turn * 0
    if GROUP > 0:
        group = turn // (GROUP // BK)
    return group


@triton.jit
def zero_of(zero, place, KIND: tl.constexpr, ZEROS: tl.constexpr, BN: tl.constexpr):
    """Returns the zero points of BN outputs, [BN, 1] float32. zero: pointer to stored zero points.
    place: their indices [BN]. ZEROS False: none are stored, and the result is 8 for int4 (KIND =
    FOUR), else 0."""
    less = tl.full((BN,), 8.0 if KIND == FOUR else 0.0, tl.float32)
    if ZEROS:
        less = tl.load(zero + place)
    return less[:, None]


@triton.jit
def outputs_of(block, N, BN: tl.constexpr, GATED: tl.constexpr):
    """Returns the indices of a program's outputs, [BN]. block: the program's index along N. GATED:
    the first half are outputs of the gate, the second half those of up, N / 2 further on."""
    n = block * BN + tl.arange(0, BN)
    if GATED:
        n = (
            block * (BN // 2)
            + tl.arange(0, BN) % (BN // 2)
            + tl.arange(0, BN) // (BN // 2) * (N // 2)
        )
    return n


@triton.jit
def leave(
    sums,
    bias,
    out,
    block,
    n,
    m,
    M,
    N,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Writes a program's sums [BN, BM] plus bias to out [M, N]. block: the program's index along N.
    n, m: indices of its outputs [BN] and rows [BM]. GATED: the first half of the sums are the
    gate's, the second half up's; silu(gate) * up is written to out [M, N / 2]."""
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


@triton.jit(do_not_specialize=["M"])
def _stream(
    x,
    weight,
    scale,
    zero,
    bias,
    out,
    parts,
    arrived,
    M,
    N,
    K,
    pitch,
    x_stride,
    each,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    LATE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Kernel of `streamed_groups`. It computes the transposed product [N, M], which needs less
    padding for few rows. A program has BN outputs and BM rows, over one of SPLIT parts of K.

    A turn loads BK bytes of packed weights of an output, whose low nibbles (int4) or bytes belong
    to one scale group. With int4 the low nibbles are BK consecutive inputs, and the high nibbles
    the next BK. weight, scale, zero: fields of GroupMatrix. parts, arrived: see `split.joined`.
    each: turns of a part of K. pitch: bytes of an output's packed weights. GROUP: inputs of a scale
    group; 0: the whole row. KIND: contents of a byte (`widen.FOUR` and others). ZEROS: True: there
    are stored zero points. GATED: output n of the result is silu(output n) * output (n + N / 2).
    AHEAD: turns whose weights are prefetched before the wait for the previous kernel. LATE: True:
    `pdl.release_late` releases the next kernel. EARLY: see pdl.py."""
    block, part = tl.program_id(0), tl.program_id(1)
    tile = tl.program_id(2) * tl.num_programs(0) + block
    n = outputs_of(block, N, BN, GATED)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    HALVES: tl.constexpr = 2 if KIND == FOUR else 1
    lane = tl.arange(0, BK)
    real_n = tl.minimum(n, N - 1)
    w_row = weight + real_n[:, None].to(tl.int64) * pitch + lane[None, :]
    x_row = x + m[:, None].to(tl.int64) * x_stride + lane[None, :]
    real = (m < M)[:, None]
    first, end = part * each, tl.minimum(part * each + each, tl.cdiv(K, HALVES * BK))
    if EARLY > 0:
        for turn in tl.static_range(AHEAD):
            fetch(weight + real_n.to(tl.int64) * pitch + tl.minimum(first + turn, end - 1) * BK)
    wait(EARLY)
    release_late(EARLY * LATE)
    sums = tl.zeros((BN, BM), tl.float32)
    for turn in tl.range(first, end, num_stages=STAGES):
        inside = (turn * BK + lane < pitch)[None, :]
        w = (
            tl.load(w_row + turn * BK)
            if EVEN_K
            else tl.load(w_row + turn * BK, mask=inside, other=0)
        )
        at = group_of(turn * HALVES, BK, GROUP) * N + real_n
        held = real if EVEN_K else real & inside
        rows = tl.load(x_row + turn * HALVES * BK, mask=held, other=0.0)
        of = tl.load(scale + at)
        less = zero_of(zero, at, KIND, ZEROS, BN)
        if KIND == FOUR:
            more_at = group_of(turn * 2 + 1, BK, GROUP) * N + real_n
            more_rows = tl.load(x_row + (turn * 2 + 1) * BK, mask=held, other=0.0)
            more_of = tl.load(scale + more_at)
            low, high = widen_four(
                w, less, zero_of(zero, more_at, KIND, ZEROS, BN), x.dtype.element_ty
            )
            sums += tl.dot(low, rows.T) * of[:, None]
            sums += tl.dot(high, more_rows.T) * more_of[:, None]
        else:
            numbers = widen_eight(w, KIND, x.dtype.element_ty)
            if ZEROS:
                numbers -= less.to(x.dtype.element_ty)
            sums += tl.dot(numbers, rows.T) * of[:, None]
    last = True
    if SPLIT > 1:
        sums, last = joined(sums, parts, arrived, tile, part, SPLIT, BN, BM)
    if last:
        leave(sums, bias, out, block, n, m, M, N, BM, BN, GATED, HAS_BIAS)


@dataclass(slots=True, frozen=True)
class Pieces:
    """The division of a product of few rows into programs."""

    rows: int  # rows of a program
    outputs: int
    split: int  # programs among which K is divided
    stages: int
    warps: int
    ahead: int = 0  # turns whose weights are prefetched before the wait for the previous kernel


def pieces_of(kind: int, m: int, n: int, k: int) -> Pieces:
    """Returns the division into programs that was fastest on an H200 for the products of an 8B
    model at 1, 16, 32, 64, 128 and 256 rows. kind: contents of a byte (`widen.FOUR` and others). m,
    n, k: numbers of rows, outputs and inputs."""
    four = kind == FOUR.value
    rows = max(8, min(64 if four else 128, next_power_of_2(m)))
    few = rows <= 16
    outputs = 32 if rows == 8 or (few and not four) else 64
    warps = 4 if not few else 1 if four and rows == 8 and n * k > 1 << 25 else 2
    tiles = cdiv(n, outputs) * cdiv(m, rows)
    # parts of K that would give enough programs to keep the GPU busy
    wanted = (25_600 if few else 16_384) // outputs / tiles
    split = 1 << max(0, round(math.log2(wanted)))
    return Pieces(rows, outputs, max(1, min(split, k // 1024, 8 if few else 4)), 3, warps)


@dataclass(slots=True, frozen=True)
class GroupMatrix(TakesWideRows):
    """A matrix [N, K] with group scales, and counters for its products. Because of the counters,
    products with the same matrix must not overlap in time."""

    weight: Tensor  # uint8 [N, K]; int4: [N, K / 2], packed by `widen.in_halves`
    # scales, [groups, N] float32: asynchronous copies need at least four bytes a thread
    scale: Tensor
    zero: Tensor | None  # zero points, [groups, N] float32; None: symmetric quantization
    kind: int
    shape: tuple[int, int]
    group: int  # inputs of a scale group; 0: the whole row
    dtype: torch.dtype
    # int32: a counter of finished programs for each output tile; zeros between calls
    arrived: Tensor
    lone: Tensor | None = (
        # The scales again, [N, groups] of `dtype`, for the kernel that multiplies a single
        # fixed-point row (linear_four.py). None: that kernel can't multiply by this matrix.
        None
    )

    def form(self, rows: int) -> Form:
        return "wide" if rows > 1 or self.lone is None else "fixed"

    @property
    def streamed(self) -> GroupMatrix:
        """The matrix for the fused one-row operations."""
        return self

    @property
    def nbytes(self) -> int:
        return (
            self.weight.nbytes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)
        )


def turn_of(kind: int, k: int, group: int) -> int:
    """Returns the bytes of packed weights of an output that an iteration (turn) loads. It is a
    power of two, at most 128, that divides a scale group. With int4 it also divides K / 2, since
    the end of a row is not masked. kind: contents of a byte (`widen.FOUR` and others). k: inputs.
    group: inputs of a scale group; 0: the whole row."""
    size = group or 128
    if kind == FOUR.value:
        size |= k // 2
    return min(128, size & -size)


def streamed_groups(
    x: Tensor,
    matrix: GroupMatrix,
    bias: Tensor | None = None,
    cut: Pieces | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """Returns x @ matrix.T + bias, [M, N], by this module's kernel, for any number of rows. gated:
    True for a matrix [2F, K] (the gate's rows, then up's) returns silu(gate) * up, [M, F]. cut:
    None: see `pieces_of`."""
    (m, k), n, device = x.shape, matrix.shape[0], x.device
    out = torch.empty((m, n // 2 if gated else n), dtype=x.dtype, device=device)
    if not m:
        return out
    cut = cut or pieces_of(matrix.kind, m, n, k)
    turn, pitch = turn_of(matrix.kind, k, matrix.group), matrix.weight.shape[1]
    tile = (cut.outputs, cut.rows)
    grid, each, parts = split_launch(
        out, matrix.arrived, (n, m), tile, cdiv(pitch, turn), cut.split
    )
    early = has_pdl(device)
    _stream[grid](
        x,
        matrix.weight,
        matrix.scale,
        x if matrix.zero is None else matrix.zero,
        x if bias is None else bias,
        out,
        parts,
        matrix.arrived,
        m,
        n,
        k,
        pitch,
        x.stride(0),
        each,
        BM=cut.rows,
        BN=cut.outputs,
        BK=turn,
        GROUP=matrix.group,
        KIND=matrix.kind,
        ZEROS=matrix.zero is not None,
        SPLIT=grid[1],
        GATED=gated,
        EVEN_K=pitch % turn == 0,
        HAS_BIAS=bias is not None,
        STAGES=cut.stages,
        AHEAD=cut.ahead,
        LATE=m == 1 and not gated,
        EARLY=early,
        num_warps=cut.warps,
        launch_pdl=bool(early),
    )
    return out
