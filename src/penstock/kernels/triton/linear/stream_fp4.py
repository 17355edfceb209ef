"""Products of few rows with weights in four-bit floats. The weight is read once; a program widens
and scales it in registers for tensor cores. An e2m1 number times its group's scale has six
significant bits, so it is exact in bfloat16 and float16. The float32 factor of a row of the matrix
is applied to the sums.

M: rows of x, N: outputs, K: inputs. A turn is an iteration along K: it loads BK bytes of packed
weights of each output, which are 2 * BK inputs. Knows rows and a matrix; no layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.fp8_rows import Form
from penstock.kernels.triton.grid import cdiv, next_power_of_2, shared_of
from penstock.kernels.triton.linear.fp4_scales import in_pairs, short_scales
from penstock.kernels.triton.linear.split import joined, split_launch
from penstock.kernels.triton.linear.stream_groups import leave, outputs_of
from penstock.kernels.triton.linear.widen import in_halves, widen_fp4
from penstock.kernels.triton.pdl import has_pdl, release_late, wait

MOST_TURNED = 64  # the largest `Fp4Weight.turn`: 64 numbers of 16 bits are a cache line of x
# bytes of shared memory that a program needs for tiles of 128 rows of x by 64 bytes of each
# output's weights
ROOMY = 131_072


@triton.jit
def scale_pairs(scale, n, N, turn, BN: tl.constexpr, BK: tl.constexpr):
    """Loads the scales of the bytes that a turn loads. scale: in the layout of
    `fp4_scales.in_pairs`. n: indices of outputs [BN]. BK: bytes of a turn, a power of two from 32
    to 128. Returns int32 [BN, BK]: the lowest byte is the scale of the weight byte's low nibble,
    the next one that of its high nibble."""
    EACH: tl.constexpr = BK // 16
    first = (turn // (8 // EACH) * N + n) * 8 + turn % (8 // EACH) * EACH
    pairs = tl.load(scale + first[:, None] + tl.arange(0, EACH)[None, :]).to(tl.int32)
    return pairs[:, :, None].broadcast_to(BN, EACH, 16).reshape(BN, BK)


@triton.jit
def firsts(turn, TURN: tl.constexpr, BK: tl.constexpr):
    """Returns which inputs are in the low nibbles of the BK bytes of a turn: input begin + lane[i]
    for byte i. begin is a number, lane [BK]. The high nibble of the same byte is the input TURN
    further on. The result has two parts so that the compiler recognises runs of inputs that it can
    copy 16 bytes at a time."""
    octet = tl.arange(0, BK)
    if BK >= TURN:
        begin, lane = turn * (2 * BK), octet // TURN * (2 * TURN) + octet % TURN
    else:
        EACH: tl.constexpr = TURN // BK
        begin, lane = turn // EACH * (2 * TURN) + turn % EACH * BK, octet
    return begin, lane


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
    TURN: tl.constexpr,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    LATE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Kernel of `streamed_fp4`. It computes the transposed product [N, M]; a program has BN outputs
    and BM rows, over one of SPLIT parts of K.

    weight, scale, by, TURN: fields of Fp4Weight. parts, arrived: see `split.joined`. each: turns of
    a part of K. BK: bytes of packed weights of an output in a turn, a power of two from 32 on.
    GATED: half of a program's outputs are the gate's, half are up's, N / 2 rows further on;
    silu(gate) * up is written. EVEN_K: True: no mask is needed along K. LATE: True:
    `pdl.release_late` releases the next kernel. EARLY: see pdl.py."""
    block, part = tl.program_id(0), tl.program_id(1)
    tile = tl.program_id(2) * tl.num_programs(0) + block
    n = outputs_of(block, N, BN, GATED)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    octet, real_n = tl.arange(0, BK), tl.minimum(n, N - 1)
    w_row = weight + real_n[:, None].to(tl.int64) * (K // 2) + octet[None, :]
    x_row = x + m[:, None].to(tl.int64) * x_stride + firsts(0, TURN, BK)[1][None, :]
    real = (m < M)[:, None]
    first, end = part * each, tl.minimum(part * each + each, tl.cdiv(K, 2 * BK))
    tl.assume(
        first < end
    )  # otherwise the assembler waits for each product in turn, as a product might not set `sums`
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
        at, _ = firsts(turn, TURN, BK)
        rows = tl.load(x_row + at, mask=held, other=0.0)
        more_rows = tl.load(x_row + at + TURN, mask=held, other=0.0)
        pairs = scale_pairs(scale, real_n, N, turn, BN, BK)
        low, high = widen_fp4(w, pairs, pairs >> 8, x.dtype.element_ty)
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
    """The division of a product of few rows into programs."""

    rows: int  # rows of a program
    outputs: int
    octets: int  # bytes of packed weights of an output in a turn: 32, 64 or 128
    split: int  # programs along K
    stages: int
    warps: int


def slices_of(m: int, n: int, k: int, room: int) -> Slices:
    """Returns the division into programs that was fastest on an H200 for an 8B model's products, of
    2 to 3 tile sizes by 1 to 8 parts of K. m, n, k: numbers of rows, outputs and inputs. room:
    bytes of shared memory of a program.

    Times in us for qkv, out, gate and up, and down, compared with cuBLAS and the matrix in
    bfloat16: 16 rows 12.8, 9.1, 36.9, 21.2 (cuBLAS 16, 13, 57, 32); 32 rows 13.3, 10.4, 47.6, 26.1
    (17, 13, 57, 33); 64 rows 17.8, 13.2, 63.6, 34.1 (16, 11, 61, 35); 128 rows 25.9, 18.0, 86.6,
    44.5 (17, 14, 66, 37)."""
    rows = max(8, min(128, next_power_of_2(m)))
    few, outputs = rows <= 16, 64
    octets = 128 if rows == 32 else 32 if rows == 128 and room < ROOMY else 64
    tiles = cdiv(n, outputs) * cdiv(m, rows)
    wanted = (2048 if few else 900 if rows == 32 else 400) // tiles  # programs along K
    split = 1 << max(0, wanted.bit_length() - 1)
    return Slices(
        rows, outputs, octets, max(1, min(split, k // 1024, 8 if few else 4)), 3, 2 if few else 4
    )


@dataclass(slots=True, frozen=True)
class Fp4Weight:
    """A matrix [N, K] of four-bit floats, and counters for its products. Because of the counters,
    its products must run one after another on one stream.

    weight: uint8 [N, K / 2]. Of each 2 * turn inputs, the first `turn` are the low nibbles of
    `turn` bytes, the others their high nibbles. So a program reads whole cache lines of a row of x
    for the low and for the high nibbles. With 128 rows and a matrix of 28,672 x 4,096, an H200
    takes 86 us with turn = 64, and 155 us with 16, the packing of kernels/fp4_matrix.py. scale:
    int16 [ceil(K / 256), N, 8], from `fp4_scales.in_pairs`."""

    weight: Tensor
    scale: Tensor
    by: Tensor  # [N] float32: factor of each row's sums
    dtype: torch.dtype
    arrived: Tensor  # int32: counters of finished programs, zeros between calls
    turn: int

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
    """Prepares a matrix for the products. numbers, scale, whole: in the layout of
    kernels/fp4_matrix.py. dtype: the model's."""
    n, k = numbers.shape[0], 2 * numbers.shape[1]
    numbers, short, by = short_scales(numbers.contiguous(), scale, whole)
    turn = min(MOST_TURNED, k // 2 & -(k // 2))
    # enough counters for products of 1,024 rows
    arrived = torch.zeros(8 * cdiv(n, 32), dtype=torch.int32, device=numbers.device)
    return Fp4Weight(in_halves(numbers, turn), in_pairs(short, k, turn), by, dtype, arrived, turn)


def streamed_fp4(
    x: Tensor,
    matrix: Fp4Weight,
    bias: Tensor | None = None,
    cut: Slices | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """Returns x @ matrix.T + bias, [M, N], by this module's kernel, for any number of rows. gated:
    True for a matrix [2F, K] (the gate's rows, then up's) returns silu(gate) * up, [M, F]. cut:
    None: see `slices_of`."""
    (m, k), n, device = x.shape, matrix.shape[0], x.device
    out = torch.empty((m, n // 2 if gated else n), dtype=x.dtype, device=device)
    if not m:
        return out
    cut = cut or slices_of(m, n, k, shared_of(device))
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
        TURN=matrix.turn,
        SPLIT=grid[1],
        GATED=gated,
        EVEN_K=k % (2 * cut.octets) == 0,
        HAS_BIAS=bias is not None,
        STAGES=cut.stages,
        LATE=m == 1 and not gated,
        EARLY=early,
        num_warps=cut.warps,
        launch_pdl=bool(early),
    )
    return out
