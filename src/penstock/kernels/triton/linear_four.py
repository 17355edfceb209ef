"""The product of one row in fixed point with weights of four bits: integers, four at a time, without tensor cores.

A program has all of K for some outputs: there are no parts to join, and its first weights are on their way before the
kernel ahead has ended. Per 32 weights a thread takes 16 bytes, eight masks and sixteen products of four numbers each;
the sums of 16 numbers are exact, and are scaled in float32. The answer may leave as the next product wants it. It knows
a matrix and a row; no layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.fixed_row import FIXED, FixedRow, empty_fixed
from penstock.kernels.fp8_rows import Form
from penstock.kernels.triton.fixed_row import store_fixed
from penstock.kernels.triton.fp8 import pointers
from penstock.kernels.triton.grid import cdiv
from penstock.kernels.triton.pdl import has_pdl, wait
from penstock.kernels.triton.stream_groups import GroupMatrix

SIGNED: tl.constexpr = tl.constexpr("dp4a.u32.s32 $0, $1, $2, $3;")
UNSIGNED: tl.constexpr = tl.constexpr("dp4a.u32.u32 $0, $1, $2, $3;")


@triton.jit
def _times(w, x, sums, PROGRAM: tl.constexpr, PLAIN: tl.constexpr):
    """sums plus the products of the four bytes of w, 0 to 255, with those of x. PLAIN: without assembler."""
    if PLAIN:
        w, x = tl.broadcast(w, x)
        for at in tl.static_range(4):
            number = (x >> (8 * at)) & 255
            if PROGRAM == SIGNED:
                number -= (number & 128) * 2
            sums += ((w >> (8 * at)) & 255) * number
        return sums
    else:
        return tl.inline_asm_elementwise(PROGRAM, "=r,r,r,r", [w, x, sums], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _words(x, C: tl.constexpr, R: tl.constexpr):
    """x [C, R, 4] -> its four [C, R]."""
    even, odd = tl.split(x.reshape(C, R, 2, 2))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _sixteen(w, high, low, sums, MASK: tl.constexpr, PLAIN: tl.constexpr):
    """256 times the products of the masked bytes of four words w with `high`, and those with `low`, added up."""
    a, b, c, d = w[0] & MASK, w[1] & MASK, w[2] & MASK, w[3] & MASK
    total = _times(a, high[0], a * 0, SIGNED, PLAIN)
    total = _times(b, high[1], total, SIGNED, PLAIN)
    total = _times(c, high[2], total, SIGNED, PLAIN)
    total = _times(d, high[3], total, SIGNED, PLAIN) * 256 + sums
    total = _times(a, low[0], total, UNSIGNED, PLAIN)
    total = _times(b, low[1], total, UNSIGNED, PLAIN)
    total = _times(c, low[2], total, UNSIGNED, PLAIN)
    return _times(d, low[3], total, UNSIGNED, PLAIN)


@triton.jit
def _row_words(at, inside, C: tl.constexpr, EVEN: tl.constexpr):
    """The 16 bytes at `at` [C, 1] (of two words of 8) as four words. So few numbers are asked for by each thread where
    it needs them; more than there are threads would go through shared memory."""
    both = at[:, :, None] + tl.arange(0, 2)[None, None, :]
    x = tl.load(both) if EVEN else tl.load(both, mask=inside[:, :, None], other=0)
    even, odd = tl.split(x)
    return even.to(tl.int32), (even >> 32).to(tl.int32), odd.to(tl.int32), (odd >> 32).to(tl.int32)


@triton.jit
def _row(numbers, scales, sums, block, C: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):
    """The numbers of blocks [C, 1] of the row as words, the scales, and the sums."""
    inside = block < K // 16
    high = _row_words(numbers + block * 2, inside, C, EVEN)
    low = _row_words(numbers + K // 8 + block * 2, inside, C, EVEN)
    of = tl.load(scales + block) if EVEN else tl.load(scales + block, mask=inside, other=0.0)
    total = tl.load(sums + block) if EVEN else tl.load(sums + block, mask=inside, other=0)
    return high, low, of, total


@triton.jit
def _weights(weight, scale, n, chunk, there, K: tl.constexpr, TURN: tl.constexpr):
    """Words of outputs n [1, R] at chunks [C, 1] of 16 bytes, [C, R, 4], and both halves' scales [C, R, 2]."""
    at = n.to(tl.int64) * (K // 8) + chunk * 4
    words = tl.load(weight + at[:, :, None] + tl.arange(0, 4)[None, None, :], mask=there[:, :, None], other=0)
    group = n * (K // TURN) + chunk // (TURN // 16) * 2
    of = tl.load(scale + group[:, :, None] + tl.arange(0, 2)[None, None, :], mask=there[:, :, None], other=0.0)
    return words, of


@triton.jit
def _store(
    answer, kind: tl.constexpr, out, out_sums, out_scale, last, HALF: tl.constexpr, GATED: tl.constexpr,
    FIXED: tl.constexpr,
):  # fmt: skip
    """Leaves a program's answer, rounded to `kind`, of the row's `last` numbers, gated first."""
    own = tl.program_id(0) * HALF + tl.arange(0, HALF)
    if GATED:
        a, b = tl.split(answer.to(kind).to(tl.float32).reshape(2, HALF).permute(1, 0))
        answer = a / (1.0 + tl.exp(-a)) * b
    if FIXED:
        values = tl.where(own < last, answer.to(kind).to(tl.float32), 0.0).reshape(HALF // 16, 16)
        block = tl.program_id(0) * (HALF // 16) + tl.arange(0, HALF // 16)
        store_fixed(values, out, out_scale, out_sums, block, block * 16 < last, last)
    else:
        tl.store(out + own, answer.to(kind), mask=own < last)


@triton.jit
def _linear_four(
    numbers, x_scale, x_sums, weight, scale, bias, out, out_sums, out_scale, N,
    K: tl.constexpr, R: tl.constexpr, C: tl.constexpr, TURN: tl.constexpr, GATED: tl.constexpr, FIXED: tl.constexpr,
    HAS_BIAS: tl.constexpr, UNROLL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """R: outputs of a program; GATED: half of them, output n being silu(n) * (n + N / 2). C: chunks of a turn, which
    are 16 bytes of an output's weights. FIXED: the answer leaves in fixed point, `out` being its numbers."""
    CHUNKS: tl.constexpr = K // 32
    EVEN: tl.constexpr = CHUNKS % C == 0
    PLAIN: tl.constexpr = scale.dtype.element_ty == tl.float32  # the interpreter's
    EACH: tl.constexpr = TURN // 16
    HALF: tl.constexpr = R // 2 if GATED else R
    lane, place = tl.arange(0, C)[:, None], tl.arange(0, R)[None, :]
    n = tl.program_id(0) * HALF + place % HALF + place // HALF * (N // 2)
    n = tl.minimum(n, N - 1)
    w, of = _weights(weight, scale, n, lane, lane < CHUNKS, K, TURN)
    more, more_of = _weights(weight, scale, n, lane + C, lane + C < CHUNKS, K, TURN)
    wait(EARLY)
    sums = tl.zeros((C, R), tl.float32)
    for first in tl.range(0, CHUNKS, C, loop_unroll_factor=UNROLL):
        chunk = first + lane
        ahead, ahead_of = _weights(weight, scale, n, chunk + 2 * C, chunk + 2 * C < CHUNKS, K, TURN)
        words = _words(w, C, R)
        of_low, of_high = tl.split(of.to(tl.float32))
        block = chunk // EACH * (2 * EACH) + chunk % EACH
        high, low, x_of, total = _row(numbers, x_scale, x_sums, block, C, K, EVEN)
        part = _sixteen(words, high, low, total * -8, 0x0F0F0F0F, PLAIN)
        sums += part.to(tl.float32) * (of_low * x_of)
        high, low, x_of, total = _row(numbers, x_scale, x_sums, block + EACH, C, K, EVEN)
        part = _sixteen(words, high, low, total * -128, -0x0F0F0F10, PLAIN)
        sums += part.to(tl.float32) * (of_high * (x_of * 0.0625))
        w, of, more, more_of = more, more_of, ahead, ahead_of
    answer = tl.sum(sums, axis=0)
    own = tl.program_id(0) * HALF + tl.arange(0, HALF)
    if HAS_BIAS:
        answer += tl.load(bias + own, mask=own < N, other=0.0).to(tl.float32)
    _store(answer, scale.dtype.element_ty, out, out_sums, out_scale, N // 2 if GATED else N, HALF, GATED, FIXED)


@dataclass(slots=True, frozen=True)
class Band:
    """How a product of one row is cut into programs."""

    outputs: int  # of a program; of a gated product, pairs of them
    chunks: int  # of 16 bytes of an output's weights, at once
    warps: int
    unroll: int  # turns of a loop's body


def band_of(gated: bool) -> Band:
    """The fastest of seven cuts for each of an 8B's products, on an H200: qkv, out and down 5.1, 3.4 and 9.4 us (others
    to 5.7, 4.7, 15.1), gate and up 19.9 (to 23.3)."""
    return Band(16, 32, 8, 4) if gated else Band(16, 64, 8, 2)


def fits_lone(k: int, group: int, groups: int) -> bool:
    """Returns whether a row of K numbers is multiplied here by weights of four bits in so many groups: what lies in the
    halves of a turn's bytes are two neighbouring groups."""
    return k % 32 == 0 and groups > 1 and groups % 2 == 0 and group in (32, 64, 128)


def lone_product(
    row: FixedRow, matrix: GroupMatrix, bias: Tensor | None = None, band: Band | None = None, *, gated: bool = False,
    form: Form = "wide",
) -> Tensor | FixedRow:  # fmt: skip
    """row of K, a matrix of four bits that has `lone`, bias [N] -> the product plus bias, [1, N]; gated: of a matrix
    [2 F, K] (the gate's rows, then up's) silu(gate) * up, [1, F]. form: how the answer is wanted, if it can be."""
    (n, k), scale = matrix.shape, matrix.lone
    assert scale is not None and row.width == k and not (gated and bias is not None)
    band = band or band_of(gated)
    outputs = n // 2 if gated else n
    into: Tensor | FixedRow
    if form == "fixed" and outputs % FIXED == 0:
        into = empty_fixed(outputs, scale.device)
    else:
        into = torch.empty((1, outputs), dtype=scale.dtype, device=scale.device)
    early = has_pdl(scale.device)
    _linear_four[(cdiv(outputs, band.outputs),)](
        row.numbers.view(torch.int64), row.scale, row.sums, matrix.weight.view(torch.int32), scale,
        scale if bias is None else bias, *pointers(into), n, K=k, R=band.outputs * (2 if gated else 1),
        C=band.chunks, TURN=matrix.group, GATED=gated, FIXED=isinstance(into, FixedRow), HAS_BIAS=bias is not None,
        UNROLL=band.unroll, EARLY=early, num_warps=band.warps, launch_pdl=bool(early),
    )  # fmt: skip
    return into
