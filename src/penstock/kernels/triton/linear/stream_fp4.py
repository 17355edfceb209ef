"""Products of few rows with weights in four-bit floats: the weight is streamed once, widened and
scaled on its way to tensor cores. A number times its group's scale has six bits, exact in every
dtype; a row's factor is applied to the sums. Knows rows and a matrix; no layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.fp8_rows import Form
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.linear.fp4_scales import in_pairs, short_scales
from penstock.kernels.triton.linear.split import joined, split_launch
from penstock.kernels.triton.linear.stream_groups import leave, outputs_of
from penstock.kernels.triton.linear.widen import widen_fp4
from penstock.kernels.triton.pdl import has_pdl, release_late, wait


@triton.jit
def scale_pairs(scale, n, N, turn, BK: tl.constexpr):
    """Returns the scales of the turn-th BK bytes of outputs n [BN], [BN, BK / 16] int16: for the
    low and for the high halves of 16 bytes (`fp4_scales.in_pairs`). BK: a power of two, 32 to 128.
    """
    EACH: tl.constexpr = BK // 16
    first = (turn // (8 // EACH) * N + n) * 8 + turn % (8 // EACH) * EACH
    return tl.load(scale + first[:, None] + tl.arange(0, EACH)[None, :])


@triton.jit(do_not_specialize=["M"])
def _stream_fp4(
    x,
    weight,
    scale,
    by,
    bias,
    out,
    parts,
    arrived,
    M,
    N,
    K,
    x_stride,
    each,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SHARED: tl.constexpr,
    STAGES: tl.constexpr,
    LATE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Computes the transposed product, [outputs, rows]. A turn takes BK bytes of a row, a power of
    two from 32 on. each: turns of a part. SHARED: see `widen_fp4`. GATED: output n is silu(n) * (n
    + N / 2); each is half of a program's outputs."""
    block, part = tl.program_id(0), tl.program_id(1)
    tile = tl.program_id(2) * tl.num_programs(0) + block
    n = outputs_of(block, N, BN, GATED)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    octet, real_n = tl.arange(0, BK), tl.minimum(n, N - 1)
    w_row = weight + real_n[:, None].to(tl.int64) * (K // 2) + octet[None, :]
    x_row = x + m[:, None].to(tl.int64) * x_stride + (octet // 16 * 32 + octet % 16)[None, :]
    real = (m < M)[:, None]
    first, end = part * each, tl.minimum(part * each + each, tl.cdiv(K, 2 * BK))
    wait(EARLY)
    release_late(EARLY * LATE)
    sums = tl.zeros((BN, BM), tl.float32)
    for turn in tl.range(first, end, num_stages=STAGES):
        inside = (turn * BK + octet < K // 2)[None, :]
        w = (
            tl.load(w_row + turn * BK)
            if EVEN_K
            else tl.load(w_row + turn * BK, mask=inside, other=0)
        )
        held = real if EVEN_K else real & inside
        rows = tl.load(x_row + turn * 2 * BK, mask=held, other=0.0)
        more_rows = tl.load(x_row + turn * 2 * BK + 16, mask=held, other=0.0)
        pairs = scale_pairs(scale, real_n, N, turn, BK)
        low, high = widen_fp4(w, pairs, BN, BK, x.dtype.element_ty, SHARED)
        sums = tl.dot(low, rows.T, sums)
        sums = tl.dot(high, more_rows.T, sums)
    last = True
    if SPLIT > 1:
        sums, last = joined(sums, parts, arrived, tile, part, SPLIT, BN, BM)
    if last:
        leave(
            sums * tl.load(by + real_n)[:, None],
            bias,
            out,
            block,
            n,
            m,
            M,
            N,
            BM,
            BN,
            GATED,
            HAS_BIAS,
        )


@dataclass(slots=True, frozen=True)
class Slices:
    """The cut of a product of few rows into programs."""

    rows: int  # rows of a program
    outputs: int
    octets: int  # bytes of a row of the weight at once: 32, 64 or 128
    split: int  # programs along K
    stages: int
    warps: int
    shared: bool  # True: widened numbers go through shared memory


def slices_of(m: int, n: int, k: int) -> Slices:
    """Returns a cut guessed by registers and instructions, not measured yet
    (`benchmarks/gpu_timing/rows.py --only fp4 --sweep`): some 800 programs for few rows, 250 for
    more, as for four-bit integers."""
    rows = max(8, min(128, next_power_of_2(m)))
    few = rows <= 16
    outputs = 32 if few else 64 if rows == 32 else 128
    octets, warps = (128, 2) if few else (32 if rows == 128 else 64, 4 if rows == 32 else 8)
    tiles = cdiv(n, outputs) * cdiv(m, rows)
    # programs along K
    wanted = (25_600 if few else 16_384 if rows == 32 else 32_768) // outputs // tiles
    split = 1 << max(0, wanted.bit_length() - 1)
    return Slices(
        rows, outputs, octets, max(1, min(split, k // 1024, 8 if few else 4)), 3, warps, not few
    )


@dataclass(slots=True, frozen=True)
class Fp4Weight:
    """A matrix [N, K] of four-bit floats, and counters for its products: calls must follow one
    another on one stream.

    weight: bytes [N, K / 2] in the layout of kernels/fp4_matrix.py. scale: int16 [ceil(K / 256), N,
    8], pairs of kernels/triton/linear/fp4_scales.py."""

    weight: Tensor
    scale: Tensor
    by: Tensor  # [N] float32, final factor of each row
    dtype: torch.dtype
    arrived: Tensor  # int32, zeros between calls

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], 2 * self.weight.shape[1]

    def form(self, rows: int) -> Form:
        return "wide" if rows > 1 else "fixed"

    @property
    def streamed(self) -> Fp4Weight:
        """The matrix for the fused one-row operations."""
        return self

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scale.nbytes + self.by.nbytes


def fp4_weight(
    numbers: Tensor, scale: Tensor, whole: Tensor | None, dtype: torch.dtype
) -> Fp4Weight:
    """Prepares numbers, scale, whole in the layout of kernels/fp4_matrix.py for the products.
    dtype: the model's."""
    n, k = numbers.shape[0], 2 * numbers.shape[1]
    weight, short, by = short_scales(numbers.contiguous(), scale, whole)
    # enough counters for 1,024 rows
    arrived = torch.zeros(8 * cdiv(n, 32), dtype=torch.int32, device=numbers.device)
    return Fp4Weight(weight, in_pairs(short, k), by, dtype, arrived)


def streamed_fp4(
    x: Tensor,
    matrix: Fp4Weight,
    bias: Tensor | None = None,
    cut: Slices | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """Returns the product by this module's kernel, for any number of rows. gated: for a matrix [2
    F, K] (the gate's rows, then up's) silu(gate) * up, [T, F]."""
    (m, k), n, device = x.shape, matrix.shape[0], x.device
    out = torch.empty((m, n // 2 if gated else n), dtype=x.dtype, device=device)
    if not m:
        return out
    cut = cut or slices_of(m, n, k)
    tile = (cut.outputs, cut.rows)
    grid, each, parts = split_launch(
        out, matrix.arrived, (n, m), tile, cdiv(k, 2 * cut.octets), cut.split
    )
    early = has_pdl(device)
    _stream_fp4[grid](
        x,
        matrix.weight,
        matrix.scale,
        matrix.by,
        x if bias is None else bias,
        out,
        parts,
        matrix.arrived,
        m,
        n,
        k,
        x.stride(0),
        each,
        BM=cut.rows,
        BN=cut.outputs,
        BK=cut.octets,
        SPLIT=grid[1],
        GATED=gated,
        EVEN_K=k % (2 * cut.octets) == 0,
        HAS_BIAS=bias is not None,
        SHARED=cut.shared,
        STAGES=cut.stages,
        LATE=m == 1 and not gated,
        EARLY=early,
        num_warps=cut.warps,
        launch_pdl=bool(early),
    )
    return out
