"""Product of one fixed-point row with four-bit weights (int4, or e2m1 floats). It uses dp4a, the
integer instruction that multiplies and adds four pairs of bytes, and no tensor cores.

A program computes some outputs over all K inputs, so no partial sums have to be joined. It loads
its first weights before the previous kernel has ended. For 32 weights a thread loads 16 bytes, and
executes eight masks and sixteen dp4a. Sums over 16 weights are exact integers; they are then scaled
in float32. Four-bit floats are converted by table lookup: twice an e2m1 magnitude is a whole number
that fits in a byte, and one instruction looks up four of them. The output may be quantized for the
next product.

N: outputs of the matrix, K: inputs. R: outputs of a program, C: chunks of an iteration. A chunk is
16 bytes of packed weights of one output, as four int32 words: 16 weights in low nibbles, 16 in high
nibbles. Knows a matrix and a row; no layer."""

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
# Assembler that converts the eight e2m1 numbers in register $2 to ABOVE + twice each number, one in
# each byte: the low nibbles to $0, the high nibbles to $1. It uses prmt, which looks up a byte in a
# table of eight by three bits of a nibble; if the nibble's fourth bit (e2m1's sign) is set, it
# gives 0 instead, as all entries are below 128. So one lookup gives the results of non-negative
# numbers, and one with inverted sign bits those of negative numbers. $3 and $4: the first four
# bytes of both tables.
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
# Assembler that gives the first four bytes of both lookup tables. They are constants, but are
# computed from a non-negative number $2: if the assembler knew that they are constants, it would
# load them again before each lookup, which costs 0.5 instructions a weight.
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
    """Returns sums + the dot product of the four bytes of each int32 w (unsigned) with the four
    bytes of the int32 x. PROGRAM: SIGNED or UNSIGNED, for the bytes of x. PLAIN: True computes
    without assembler, for Triton's interpreter."""
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
    """Splits chunks x [C, R, 4], int32 words, into a tuple of four tensors [C, R], one for each
    word."""
    even, odd = tl.split(x.reshape(C, R, 2, 2))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _masked(w, MASK: tl.constexpr):
    """Returns a tuple of four int32 tensors w, each combined with MASK by bitwise and."""
    return w[0] & MASK, w[1] & MASK, w[2] & MASK, w[3] & MASK


@triton.jit
def _first(number, PLAIN: tl.constexpr):
    """Returns the first four bytes of each of the two lookup tables that `_twice` needs, as int32.
    number: any non-negative number that the compiler can't know in advance. PLAIN: see `_times`;
    the results are unused."""
    if PLAIN:
        return number, number
    else:
        return tl.inline_asm_elementwise(
            _FIRST, "=r,=r,r", [number], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )


@triton.jit
def _twice(w, first, PLAIN: tl.constexpr):
    """Converts the eight e2m1 numbers of each int32 word w to ABOVE + twice the number, one in each
    byte. Returns two words: the converted low nibbles, and the converted high nibbles. first: from
    `_first`. PLAIN: see `_times`."""
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
    """Returns ABOVE + twice the e2m1 number whose four bits are `number`."""
    power, last = (number >> 1) & 3, number & 1
    size = tl.where(power == 0, last, (2 + last) << tl.maximum(power - 1, 0))
    return ABOVE + tl.where(number >= 8, -size, size)


@triton.jit
def _looked_up(w, first, PLAIN: tl.constexpr):
    """Applies `_twice` to a tuple of four words w. Returns two tuples: four words of converted low
    nibbles, and four of converted high nibbles."""
    a, e = _twice(w[0], first, PLAIN)
    b, f = _twice(w[1], first, PLAIN)
    c, g = _twice(w[2], first, PLAIN)
    d, h = _twice(w[3], first, PLAIN)
    return (a, b, c, d), (e, f, g, h)


@triton.jit
def _sixteen(w, high, low, sums, PLAIN: tl.constexpr):
    """Returns `sums` + the dot product of 16 weights with 16 numbers of the row, as int32. w: the
    weights, unsigned bytes in a tuple of four words. high, low: the high (signed) and low
    (unsigned) bytes of the row's 16-bit numbers, in tuples of four words. The result is sums + 256
    * (w . high) + w . low."""
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
    """Loads 16 bytes for each index of C. at: pointers [C, 1] to two int64. inside: mask [C, 1],
    used unless EVEN. Returns a tuple of four int32 words [C, 1]. Every thread loads all the words
    that it needs itself, which avoids shared memory."""
    both = at[:, :, None] + tl.arange(0, 2)[None, None, :]
    x = tl.load(both) if EVEN else tl.load(both, mask=inside[:, :, None], other=0)
    even, odd = tl.split(x)
    return even.to(tl.int32), (even >> 32).to(tl.int32), odd.to(tl.int32), (odd >> 32).to(tl.int32)


@triton.jit
def _row(numbers, scales, sums, block, C: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):
    """Loads blocks of 16 numbers of the fixed-point row (kernels/fixed_row.py). block: indices of
    blocks [C, 1]. EVEN: True: all indices are below K / 16. Returns for each block its high bytes
    and its low bytes, in tuples of four int32 words, its scale, and the sum of its 16-bit integers.
    """
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
    """Loads chunks of packed weights and their scales. n: outputs [1, R]. chunk: indices of chunks
    [C, 1], with mask `there`. Returns words [C, R, 4] int32, and scales [C, R, 2] of a chunk's low
    and high nibbles. TURN: see `_linear_four`. FLOATS: True: e2m1 weights with scale bytes; False:
    int4 weights with float scales."""
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
    """Converts scale bytes of kernels/triton/linear/fp4_scales.py to float32. The results are 2 **
    -98 times the scales, as that takes a single shift."""
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
    """Writes a program's outputs, rounded to the dtype `kind`. answer: float32 [R]. GATED: stores
    silu(gate) * up, where the gate is the first half of `answer` and up the second. HALF: numbers
    that the program stores. FIXED: stores them in fixed point. last: numbers of the whole output
    row."""
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
    """Kernel of `lone_product`. One program computes R outputs of the matrix.

    numbers, x_scale, x_sums: the row, fields of FixedRow. weight: int32 [N, K / 8]. scale: with
    FLOATS, bytes of `Fp4Weight.scale`, else [N, groups]. by: with FLOATS, [N] float32. out,
    out_sums, out_scale: the output; the last two only if FIXED. C: chunks of an output that an
    iteration loads. TURN: consecutive bytes of weights whose low nibbles belong to one run of TURN
    inputs, and whose high nibbles to the next run; for int4 the size of a scale group. FLOATS:
    True: the weights are e2m1 (`Fp4Weight`); False: int4. GATED: R / 2 of a program's outputs are
    the gate's and R / 2 are up's, N / 2 rows further on; silu(gate) * up is written. WIDE: the
    model's dtype. FIXED: writes the output in fixed point. UNROLL: factor by which the loop is
    unrolled. EARLY: see pdl.py."""
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
            # the factor is 2 ** 64
            sums += part.to(tl.float32) * (of_low * (x_of * 18446744073709551616.0))
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
    # `_power` gives scales without a factor of 2 ** 98, of which the loop applied 2 ** 64. The e2m1
    # numbers were doubled. So a factor of 2 ** 33 remains.
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
    """The division of a one-row product into programs."""

    outputs: int  # outputs of a program; if gated, pairs of a gate's and an up's output
    chunks: int  # chunks (16 bytes of packed weights) of an output that an iteration loads
    warps: int
    unroll: int  # factor by which the loop is unrolled


def band_of(gated: bool, floats: bool, k: int) -> Band:
    """Returns the division into programs that is fastest on an H200 for an 8B model. k: the
    matrix's inputs.

    Times in us of the fastest division (and of the slowest) for qkv, out, down, and gate and up:
    int4, seven divisions tried, 5.1 (5.7), 3.4 (4.7), 9.4 (15.1), 19.9 (23.3); four-bit floats, 17
    tried, 7.0 (10.4), 5.3 (8.3), 14.6 (24.7), 25.2 (36.9)."""
    if gated or (floats and k <= 8192):
        return Band(16, 32, 8, 4)
    return Band(16, 64, 8, 2)


def fits_lone(k: int, group: int, groups: int) -> bool:
    """Returns True if this kernel can multiply by an int4 matrix of this shape. k: inputs. group:
    inputs of a scale group. groups: number of scale groups of a row. It must be even, as the low
    nibbles of a run of bytes belong to one group and the high nibbles to the next."""
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
    [1, N]. An int4 matrix must have its scales in `GroupMatrix.lone`. gated: True for a matrix [2F,
    K] (the gate's rows, then up's) returns silu(gate) * up, [1, F]. form: "fixed" returns a
    FixedRow if the number of outputs is a multiple of 16; otherwise the result has the model's
    dtype. band: None: see `band_of`."""
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
    """Returns three arguments of `_linear_four`: scale, by (for int4 a tensor that is not read) and
    TURN."""
    if isinstance(matrix, Fp4Weight):
        return matrix.scale.view(torch.uint8), matrix.by, matrix.turn
    assert matrix.lone is not None
    return matrix.lone, matrix.lone, matrix.group
