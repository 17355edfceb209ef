"""Products with float8 weights. One row is multiplied by `linear_one`. Up to 256 rows are
multiplied by the kernel of this file, which reads the weight once; x is in e4m3, and for 2 to 16
rows in pairs of e4m3 (kernels/fp8_rows.py), as precise as bfloat16. More rows are multiplied by
torch's `_scaled_mm`.

Times in us of an 8B model's four products (qkv, out, gate and up, down), in a CUDA graph on an
H200. With 128 rows torch takes 14.5, 14.2, 38.0 and 37.9, this kernel 11.3, 9.2, 37.3 and 23.2.
With 32 rows torch takes 14.2, 13.8, 37.9 and 37.7, this kernel 9.6, 8.3, 32.4 and 19.5. To read the
weights at copy speed takes 5.9, 3.9, 27.6 and 13.8. With bulk copies (TMA) instead of asynchronous
loads, the two smallest products are 4 to 8 % faster at 128 rows, and the others are the same. M or
T: rows, N: outputs, K: inputs. Knows rows and a matrix; no layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.fp8_rows import Form, Fp8Rows, Rows
from penstock.kernels.triton.grid import cdiv
from penstock.kernels.triton.linear.fp8 import pointers
from penstock.kernels.triton.linear.linear_one import linear_one
from penstock.kernels.triton.linear.linear_small import SmallWeight, cut_of
from penstock.kernels.triton.linear.split import joined
from penstock.kernels.triton.pdl import FEW, fetch, has_pdl, wait

MOST_PAIRED = 16  # the most rows of x that are in pairs of e4m3
# bytes of an output's weights that are prefetched before the wait for the previous kernel
AHEAD: tl.constexpr = tl.constexpr(512)
MOST_STREAMED = 256  # the most rows for the kernel of this file; torch is faster with more


@triton.jit(do_not_specialize=["M"])
def _linear_fp8(
    x,
    x_low,
    x_scale,
    weight,
    scale,
    bias,
    out,
    parts,
    arrived,
    M,
    N,
    K,
    each,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PAIRED: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Kernel of `streamed_fp8`. It computes the transposed product [N, M], since tensor cores then
    need less padding for few rows. A program computes BN outputs of BM rows, over one of SPLIT
    parts of K.

    x, x_low, x_scale: fields of Fp8Rows; x_low is read only if PAIRED. weight: [N, K] e4m3, scale:
    [N]. parts, arrived: see `split.joined`. each: iterations, of BK inputs each, of a part of K.
    EVEN_K: True: BK divides K. STAGES: of the loop's pipeline. EARLY: see pdl.py."""
    block, part = tl.program_id(0), tl.program_id(1)
    tile = tl.program_id(2) * tl.num_programs(0) + block
    n = block * BN + tl.arange(0, BN)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    lane = tl.arange(0, BK)
    w_row = weight + tl.minimum(n, N - 1)[:, None].to(tl.int64) * K + lane[None, :]
    x_row = m[:, None].to(tl.int64) * K + lane[None, :]
    # Rows of padding are masked, not loaded: if many programs load the same row, they wait for each
    # other, which takes 1.2 times as long.
    real = (m < M)[:, None]
    if EARLY > 0:
        for line in tl.static_range(AHEAD // 128):
            ahead = tl.minimum(part * each + line * 128, K - 1)
            fetch(weight + tl.minimum(n, N - 1).to(tl.int64) * K + ahead)
    wait(EARLY)
    sums = tl.zeros((BN, BM), tl.float32)
    rest = tl.zeros((BN, BM), tl.float32)
    for at in tl.range(part * each, tl.minimum(part * each + each, K), BK, num_stages=STAGES):
        held = real
        if EVEN_K:
            w = tl.load(w_row + at)
        else:
            inside = (at + lane < K)[None, :]
            held = real & inside
            w = tl.load(w_row + at, mask=inside, other=0.0)
        sums = tl.dot(w, tl.load(x + x_row + at, mask=held, other=0.0).T, sums)
        if PAIRED:
            rest = tl.dot(w, tl.load(x_low + x_row + at, mask=held, other=0.0).T, rest)
    if PAIRED:
        sums += rest / 16.0
    last = True
    if SPLIT > 1:
        sums, last = joined(sums, parts, arrived, tile, part, SPLIT, BN, BM)
    if last:
        of_n = tl.load(scale + n, mask=n < N, other=0.0)
        of_m = tl.load(x_scale + m, mask=m < M, other=0.0)
        sums = sums * of_n[:, None] * of_m[None, :]
        if HAS_BIAS:
            sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        place = out + m[None, :].to(tl.int64) * N + n[:, None]
        tl.store(place, sums.to(out.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


@dataclass(slots=True, frozen=True)
class Tiles:
    """The division of a product of few rows into programs."""

    rows: int  # rows of a program
    outputs: int
    inputs: int  # inputs (elements along K) that an iteration loads
    split: int  # programs among which K is divided
    stages: int
    warps: int


def tiles_of(m: int, n: int, k: int) -> Tiles:
    """Returns the division into programs that was fastest on an H200 for the products of an 8B
    model at 32, 128 and 256 rows, and of GLM-4.5-Air at 128. m, n, k: numbers of rows, outputs and
    inputs."""
    few = 16 if m <= 16 else 32 if m <= 32 else 64 if m <= 64 else 128
    if n >= 16384:
        return Tiles(256, 128, 128, 1, 4, 8) if m > 128 else Tiles(few, 128, 128, 1, 3, 4)
    # programs of 64 outputs would be more than run at once (GLM-4.5-Air's qkv: 20.9 us for 24.6)
    if 64 < m <= 128 and n > 64 * FEW:
        return Tiles(128, 128, 128, 1, 6, 8)
    if m > 128 and n > 4096:
        return Tiles(128, 128, 128, 1, 6, 4)
    # these tiles give enough programs to keep the GPU busy: 9.2 us instead of 10.8
    if 64 < m <= 128 and n <= 4096 and k <= 8192:
        return Tiles(64, 64, 256, 1, 4, 4)
    return Tiles(few, 64, 256, 2 if k > 8192 and 64 < m <= 128 else 1, 4 if m > 64 else 6, 4)


@dataclass(slots=True, frozen=True)
class Fp8Matrix:
    """A matrix [N, K] of e4m3 numbers with one scale per row, and scratch memory for its products.
    Because of the scratch memory, products with the same matrix must not overlap in time."""

    streamed: SmallWeight  # numbers [N, K] and scale [N], for one-row products
    dtype: torch.dtype  # dtype of outputs
    by_library: bool  # True: torch's `_scaled_mm` supports this shape
    parts: Tensor  # float32: partial sums of programs that share K
    # int32: a counter of finished programs for each output tile; zeros between calls
    arrived: Tensor

    def form(self, rows: int) -> Form:
        """Returns the representation in which the product needs its input x of `rows` rows, see
        kernels/fp8_rows.py."""
        return "wide" if rows == 1 else "pair" if rows <= MOST_PAIRED else "eight"


def prepare_linear_fp8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Fp8Matrix:
    """Prepares weight [N, K] e4m3 and scale [N] float32 for `linear_fp8`. dtype: the model's."""
    n, k = weight.shape
    device = weight.device
    split = [t for t in (tiles_of(m, n, k) for m in (16, 32, 64, 128, 256)) if t.split > 1]
    sums = max((t.split * t.rows * cdiv(n, t.outputs) * t.outputs for t in split), default=0)
    parts = torch.empty(sums, dtype=torch.float32, device=device)
    arrived = torch.zeros(cdiv(n, 64), dtype=torch.int32, device=device)
    streamed = SmallWeight(weight.contiguous(), cut_of(n, k), None, None, scale.contiguous())
    return Fp8Matrix(streamed, dtype, n % 16 == 0 and k % 16 == 0, parts, arrived)


def linear_fp8(
    x: Rows, matrix: Fp8Matrix, bias: Tensor | None = None, *, streamed_rows: int = MOST_STREAMED
) -> Tensor:
    """Returns x @ (scale * weight).T + bias, [T, N]. x: [T, K], in the representation that
    `matrix.form` gives for T rows. streamed_rows: see kernels/tunables.py."""
    if isinstance(x, Tensor):
        return linear_one(x, matrix.streamed.weight, bias, scale=matrix.streamed.scale)
    if x.numbers.shape[0] <= streamed_rows or not matrix.by_library:
        return streamed_fp8(x, matrix, bias)
    return by_library(x, matrix, bias)


def streamed_fp8(
    x: Fp8Rows, matrix: Fp8Matrix, bias: Tensor | None = None, tiles: Tiles | None = None
) -> Tensor:
    """Returns the product of x [T, K] by this module's kernel, for any number of rows. tiles: None:
    see `tiles_of`."""
    weight, scale = matrix.streamed.weight, matrix.streamed.scale
    (m, k), n = x.numbers.shape, weight.shape[0]
    out = torch.empty((m, n), dtype=matrix.dtype, device=weight.device)
    if not m:
        return out
    tiles = tiles or tiles_of(m, n, k)
    each = cdiv(cdiv(k, tiles.split), tiles.inputs) * tiles.inputs
    splits = cdiv(k, each)
    grid = (cdiv(n, tiles.outputs), splits, cdiv(m, tiles.rows))
    early = has_pdl(weight.device)
    _linear_fp8[grid](
        *pointers(x),
        weight,
        scale,
        x.scale if bias is None else bias,
        out,
        matrix.parts,
        matrix.arrived,
        m,
        n,
        k,
        each,
        BM=tiles.rows,
        BN=tiles.outputs,
        BK=tiles.inputs,
        PAIRED=x.low is not None,
        SPLIT=splits,
        EVEN_K=k % tiles.inputs == 0,
        HAS_BIAS=bias is not None,
        STAGES=tiles.stages,
        EARLY=early,
        num_warps=tiles.warps,
        launch_pdl=bool(early),
    )
    return out


def by_library(x: Fp8Rows, matrix: Fp8Matrix, bias: Tensor | None) -> Tensor:
    """Returns the product by torch's `_scaled_mm` with a scale for each row and output. It writes
    bfloat16, which is converted."""
    scale = matrix.streamed.scale
    assert scale is not None
    wide = None if bias is None or matrix.dtype == torch.bfloat16 else bias
    out = torch._scaled_mm(
        x.numbers,
        matrix.streamed.weight.t(),
        scale_a=x.scale,
        scale_b=scale[None, :],
        bias=bias if wide is None else None,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    ).to(matrix.dtype)
    return out if wide is None else out.add_(wide)
