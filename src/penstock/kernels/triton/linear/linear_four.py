"""Product of one fixed-point row with four-bit weights. It uses integer instructions that multiply
four numbers at a time, and no tensor cores.

A program computes some outputs over all K inputs, so no partial sums have to be joined. It loads
its first weights before the previous kernel has ended. For 32 weights a thread loads 16 bytes, and
executes eight masks and sixteen products of four numbers each. The sums of 16 numbers are exact,
and are scaled in float32. Four-bit floats are converted by table lookup: twice each of their eight
magnitudes is a whole number that fits in a byte, and one instruction looks up four of them. The
output may be quantized for the next product. N: outputs of the matrix, K: inputs, R: outputs of a
program, C: chunks of 16 bytes. Knows a matrix and a row; no layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.fixed_row import FIXED, FixedRow, empty_fixed
from penstock.kernels.fp8_rows import Form
from penstock.kernels.triton.fixed_row import store_fixed
from penstock.kernels.triton.grid import cdiv
from penstock.kernels.triton.linear.fp8 import pointers
from penstock.kernels.triton.linear.stream_fp4 import Fp4Weight
from penstock.kernels.triton.linear.stream_groups import GroupMatrix
from penstock.kernels.triton.linear.widen import WIDE
from penstock.kernels.triton.pdl import has_pdl, wait

SIGNED: tl.constexpr = tl.constexpr("dp4a.u32.s32 $0, $1, $2, $3;")
UNSIGNED: tl.constexpr = tl.constexpr("dp4a.u32.u32 $0, $1, $2, $3;")
# added to twice a four-bit float, so that the result is not negative
ABOVE: tl.constexpr = tl.constexpr(12)
# Assembler that converts eight e2m1 numbers, in the register $2, to ABOVE + twice each, one a
# byte: those in the low halves of bytes to $0, those in the high halves to $1. The lookup
# instruction takes four bits: it gives one of eight bytes, or 0 (the byte's sign) if the upper bit
# is set. So one lookup gives the results of non-negative numbers, and one with inverted upper
# bits those of negative numbers. $3 and $4: first halves of the lookup tables.
_TWICE: tl.constexpr = tl.constexpr("""{
    .reg .b32 n, t, u, e, f, g, h;
    xor.b32 n, $2, 0x88888888;
    shr.u32 t, $2, 16;
    shr.u32 u, n, 16;
    prmt.b32 e, $3, 0x18141210, $2;
    prmt.b32 f, $4, 0x00040608, n;
    prmt.b32 g, $3, 0x18141210, t;
    prmt.b32 h, $4, 0x00040608, u;
    or.b32 e, e, f;
    or.b32 g, g, h;
    prmt.b32 $0, e, g, 0x6420;
    prmt.b32 $1, e, g, 0x7531;
}""")
# Assembler that gives the first halves of the lookup tables. They are constants, but are
# computed from a non-negative number $2: the assembler would load known constants again before each
# lookup, which costs 0.5 instructions a weight.
_FIRST: tl.constexpr = tl.constexpr("""{
    .reg .b32 t, u;
    mov.u32 t, %laneid;
    shr.u32 u, $2, 31;
    and.b32 t, t, u;
    add.u32 $0, t, 0x0F0E0D0C;
    add.u32 $1, t, 0x090A0B0C;
}""")


@triton.jit
def _times(w, x, sums, PROGRAM: tl.constexpr, PLAIN: tl.constexpr):
    """Returns sums + the products of the four bytes (0 to 255) of each word w with those of x.
    PLAIN: True computes without assembler."""
    if PLAIN:
        w, x = tl.broadcast(w, x)
        for at in tl.static_range(4):
            number = (x >> (8 * at)) & 255
            if PROGRAM == SIGNED:
                number -= (number & 128) * 2
            sums += ((w >> (8 * at)) & 255) * number
        return sums
    else:
        return tl.inline_asm_elementwise(
            PROGRAM, "=r,r,r,r", [w, x, sums], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _words(x, C: tl.constexpr, R: tl.constexpr):
    """Splits x [C, R, 4] into four tensors [C, R]."""
    even, odd = tl.split(x.reshape(C, R, 2, 2))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _masked(w, MASK: tl.constexpr):
    return w[0] & MASK, w[1] & MASK, w[2] & MASK, w[3] & MASK


@triton.jit
def _first(number, PLAIN: tl.constexpr):
    """Returns the first halves of the lookup tables of `_twice`. number: any non-negative number
    that the compiler doesn't know."""
    if PLAIN:
        return number, number
    else:
        return tl.inline_asm_elementwise(
            _FIRST, "=r,=r,r", [number], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )


@triton.jit
def _twice(w, first, PLAIN: tl.constexpr):
    """Returns ABOVE + twice each e2m1 number of words w, one a byte, in two words: of the numbers
    in the low halves of bytes, and in the high halves. first: from `_first`."""
    if PLAIN:
        low, high = w * 0, w * 0
        for at in tl.static_range(4):
            low |= _one_twice((w >> (8 * at)) & 15) << (8 * at)
            high |= _one_twice((w >> (8 * at + 4)) & 15) << (8 * at)
        return low, high
    else:
        return tl.inline_asm_elementwise(
            _TWICE,
            "=&r,=&r,r,r,r",
            [w, first[0], first[1]],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _one_twice(number):
    power, last = (number >> 1) & 3, number & 1
    size = tl.where(power == 0, last, (2 + last) << tl.maximum(power - 1, 0))
    return ABOVE + tl.where(number >= 8, -size, size)


@triton.jit
def _looked_up(w, first, PLAIN: tl.constexpr):
    """Returns `_twice` of four words w: four words for the low halves, and four for the high
    halves."""
    a, e = _twice(w[0], first, PLAIN)
    b, f = _twice(w[1], first, PLAIN)
    c, g = _twice(w[2], first, PLAIN)
    d, h = _twice(w[3], first, PLAIN)
    return (a, b, c, d), (e, f, g, h)


@triton.jit
def _sixteen(w, high, low, sums, PLAIN: tl.constexpr):
    """Returns sums + 256 * the products of the bytes of four words w with those of `high` + the
    products with those of `low`. high, low: high and low bytes of 16 numbers of the row."""
    a, b, c, d = w[0], w[1], w[2], w[3]
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
    """Loads 16 bytes at pointers `at` [C, 1] to two 64-bit words; returns them as four 32-bit
    words. Every thread loads the words that it needs itself, which avoids shared memory."""
    both = at[:, :, None] + tl.arange(0, 2)[None, None, :]
    x = tl.load(both) if EVEN else tl.load(both, mask=inside[:, :, None], other=0)
    even, odd = tl.split(x)
    return even.to(tl.int32), (even >> 32).to(tl.int32), odd.to(tl.int32), (odd >> 32).to(tl.int32)


@triton.jit
def _row(numbers, scales, sums, block, C: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):
    """Loads blocks of 16 numbers of the row: returns their high and low bytes as words, their
    scales and their sums. block: [C, 1], indices."""
    inside = block < K // 16
    high = _row_words(numbers + block * 2, inside, C, EVEN)
    low = _row_words(numbers + K // 8 + block * 2, inside, C, EVEN)
    of = tl.load(scales + block) if EVEN else tl.load(scales + block, mask=inside, other=0.0)
    total = tl.load(sums + block) if EVEN else tl.load(sums + block, mask=inside, other=0)
    return high, low, of, total


@triton.jit
def _weights(
    weight, scale, n, N, chunk, there, K: tl.constexpr, TURN: tl.constexpr, FLOATS: tl.constexpr
):
    """Loads chunks of 16 bytes of weights as words [C, R, 4], with the scales of their low and high
    halves [C, R, 2]. n: outputs [1, R]. chunk: indices [C, 1]."""
    at = n.to(tl.int64) * (K // 8) + chunk * 4
    words = tl.load(
        weight + at[:, :, None] + tl.arange(0, 4)[None, None, :], mask=there[:, :, None], other=0
    )
    if FLOATS:
        group = ((chunk // 8) * N + n) * 16 + chunk % 8 * 2
    else:
        group = n * (K // TURN) + chunk // (TURN // 16) * 2
    of = tl.load(
        scale + group[:, :, None] + tl.arange(0, 2)[None, None, :], mask=there[:, :, None], other=0
    )
    return words, of


@triton.jit
def _power(of):
    """Returns 2 ** -98 times the scales in bytes of kernels/triton/linear/fp4_scales.py."""
    return (of.to(tl.int32) << 20).to(tl.float32, bitcast=True)


@triton.jit
def _store(
    answer,
    kind: tl.constexpr,
    out,
    out_sums,
    out_scale,
    last,
    HALF: tl.constexpr,
    GATED: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Writes a program's outputs, rounded to dtype `kind`; if GATED, silu(gate) * up is computed
    first. last: numbers of the whole output row."""
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
    numbers,
    x_scale,
    x_sums,
    weight,
    scale,
    by,
    bias,
    out,
    out_sums,
    out_scale,
    N,
    K: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    TURN: tl.constexpr,
    FLOATS: tl.constexpr,
    WIDE: tl.constexpr,
    GATED: tl.constexpr,
    FIXED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UNROLL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per R outputs of the matrix. GATED: the R outputs are R / 2 of the gate and R / 2
    of up, output n of the result is silu(output n) * output (n + N / 2). C: chunks of 16 bytes of
    an output's weights that an iteration loads. FLOATS: True: the weights are four-bit floats
    (`Fp4Weight`); False: integers. WIDE: the model's dtype. FIXED: True writes the result in fixed
    point; `out` is its numbers."""
    CHUNKS: tl.constexpr = K // 32
    EVEN: tl.constexpr = CHUNKS % C == 0
    # float32 is the dtype with which Triton's interpreter runs this
    PLAIN: tl.constexpr = tl.float32 == WIDE
    EACH: tl.constexpr = TURN // 16
    HALF: tl.constexpr = R // 2 if GATED else R
    lane, place = tl.arange(0, C)[:, None], tl.arange(0, R)[None, :]
    n = tl.program_id(0) * HALF + place % HALF + place // HALF * (N // 2)
    n = tl.minimum(n, N - 1)
    w, of = _weights(weight, scale, n, N, lane, lane < CHUNKS, K, TURN, FLOATS)
    more, more_of = _weights(weight, scale, n, N, lane + C, lane + C < CHUNKS, K, TURN, FLOATS)
    tables = _first(N, PLAIN)
    wait(EARLY)
    sums = tl.zeros((C, R), tl.float32)
    for first in tl.range(0, CHUNKS, C, loop_unroll_factor=UNROLL):
        chunk = first + lane
        ahead, ahead_of = _weights(
            weight, scale, n, N, chunk + 2 * C, chunk + 2 * C < CHUNKS, K, TURN, FLOATS
        )
        words = _words(w, C, R)
        block = chunk // EACH * (2 * EACH) + chunk % EACH
        high, low, x_of, total = _row(numbers, x_scale, x_sums, block, C, K, EVEN)
        if FLOATS:
            low_words, high_words = _looked_up(words, tables, PLAIN)
            of_low, of_high = tl.split(_power(of))
            part = _sixteen(low_words, high, low, total * -ABOVE, PLAIN)
            sums += part.to(tl.float32) * (of_low * (x_of * 18446744073709551616.0))  # 2 ** 64
            high, low, x_of, total = _row(numbers, x_scale, x_sums, block + EACH, C, K, EVEN)
            part = _sixteen(high_words, high, low, total * -ABOVE, PLAIN)
            sums += part.to(tl.float32) * (of_high * (x_of * 18446744073709551616.0))
        else:
            of_low, of_high = tl.split(of.to(tl.float32))
            part = _sixteen(_masked(words, 0x0F0F0F0F), high, low, total * -8, PLAIN)
            sums += part.to(tl.float32) * (of_low * x_of)
            high, low, x_of, total = _row(numbers, x_scale, x_sums, block + EACH, C, K, EVEN)
            part = _sixteen(_masked(words, -0x0F0F0F10), high, low, total * -128, PLAIN)
            sums += part.to(tl.float32) * (of_high * (x_of * 0.0625))
        w, of, more, more_of = more, more_of, ahead, ahead_of
    answer = tl.sum(sums, axis=0)
    own = tl.program_id(0) * HALF + tl.arange(0, HALF)
    # scales lack a factor of 2 ** 98, of which 2 ** 64 is applied above; numbers were doubled, so 2
    # ** 33 remains
    if FLOATS:
        rows = tl.minimum(
            tl.program_id(0) * HALF + tl.arange(0, R) % HALF + tl.arange(0, R) // HALF * (N // 2),
            N - 1,
        )
        answer *= tl.load(by + rows) * 8589934592.0
    if HAS_BIAS:
        answer += tl.load(bias + own, mask=own < N, other=0.0).to(tl.float32)
    _store(answer, WIDE, out, out_sums, out_scale, N // 2 if GATED else N, HALF, GATED, FIXED)


@dataclass(slots=True, frozen=True)
class Band:
    """The cut of a one-row product into programs."""

    outputs: int  # outputs of a program; if gated, pairs of outputs
    chunks: int  # chunks of 16 bytes of an output's weights that are loaded at once
    warps: int
    unroll: int  # iterations to which the loop is unrolled


def band_of(gated: bool, floats: bool, k: int) -> Band:
    """Returns the fastest of seven cuts for the products of an 8B model, on an H200: qkv takes 5.1
    us (the slowest cut 5.7), out 3.4 (4.7), down 9.4 (15.1), gate and up 19.9 (23.3). For floats it
    is the fastest of 17: 7.0 (10.4), 5.3 (8.3), 14.6 (24.7), 25.2 (36.9). k: the matrix's inputs."""
    if gated or (floats and k <= 8192):
        return Band(16, 32, 8, 4)
    return Band(16, 64, 8, 2)


def fits_lone(k: int, group: int, groups: int) -> bool:
    """Returns True if this kernel can multiply by four-bit weights with K inputs. group: numbers of
    a group. groups: groups of a row, which must be even in number, as the low and high halves of an
    iteration's bytes are of two neighbouring groups."""
    return k % 32 == 0 and groups > 1 and groups % 2 == 0 and group in (32, 64, 128)


def lone_product(
    row: FixedRow,
    matrix: GroupMatrix | Fp4Weight,
    bias: Tensor | None = None,
    band: Band | None = None,
    *,
    gated: bool = False,
    form: Form = "wide",
) -> Tensor | FixedRow:
    """Returns the product of a fixed-point row of K numbers with a four-bit matrix, plus bias [N]:
    [1, N]. matrix: an integer matrix must have `lone`. gated: True for a matrix [2 F, K] (the
    gate's rows, then up's) returns silu(gate) * up, [1, F]. form: "fixed" writes the output in
    fixed point, if its size allows."""
    n, k = matrix.shape
    assert row.width == k and not (gated and bias is not None)
    floats = isinstance(matrix, Fp4Weight)
    scale, by, turn = _scales(matrix)
    band = band or band_of(gated, floats, k)
    outputs = n // 2 if gated else n
    into: Tensor | FixedRow
    if form == "fixed" and outputs % FIXED == 0:
        into = empty_fixed(outputs, scale.device)
    else:
        into = torch.empty((1, outputs), dtype=matrix.dtype, device=scale.device)
    early = has_pdl(scale.device)
    _linear_four[(cdiv(outputs, band.outputs),)](
        row.numbers.view(torch.int64),
        row.scale,
        row.sums,
        matrix.weight.view(torch.int32),
        scale,
        by,
        scale if bias is None else bias,
        *pointers(into),
        n,
        K=k,
        R=band.outputs * (2 if gated else 1),
        C=band.chunks,
        TURN=turn,
        FLOATS=floats,
        WIDE=WIDE[matrix.dtype],
        GATED=gated,
        FIXED=isinstance(into, FixedRow),
        HAS_BIAS=bias is not None,
        UNROLL=band.unroll,
        EARLY=early,
        num_warps=band.warps,
        launch_pdl=bool(early),
    )
    return into


def _scales(matrix: GroupMatrix | Fp4Weight) -> tuple[Tensor, Tensor, int]:
    """Returns the matrix's scales, the factors of its rows (floats), and how many consecutive bytes
    have low halves of one group."""
    if isinstance(matrix, Fp4Weight):
        return matrix.scale.view(torch.uint8), matrix.by, matrix.turn
    assert matrix.lone is not None
    return matrix.lone, matrix.lone, matrix.group
