"""One iteration along K of an expert's product. It multiplies a tile of weights by a tile of rows
and adds the result to sums that are transposed, [outputs, rows]. Weights are unquantized or e4m3
(`step`), four-bit floats (`step_of_four`) or integers (`step_of_integers`); the latter two are
widened in registers. BN: outputs, BM: rows, BK: inputs of the iteration. Knows tiles; no experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.linear.widen import FOUR, widen_eight, widen_four, widen_fp4


@triton.jit
def step(
    sums,
    low,
    w,
    x,
    x_low,
    x_at,
    inside,
    held,
    factor,
    SCALED: tl.constexpr,
    PAIRED: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Adds weights times rows to sums [BN, BM]. w: pointers [BN, BK]. x, x_low: base pointers of
    the rows; x_low (the second e4m3 of a pair) only if PAIRED. x_at: offsets [BM, BK]. inside: mask
    of inputs, held: mask of rows and inputs. factor: scale of this iteration, if SCALED. Returns
    sums and low. Without SCALED the products with x_low are added to low [BN, BM]."""
    number = tl.load(w) if EVEN_K else tl.load(w, mask=inside, other=0.0)
    row = tl.load(x + x_at, mask=held, other=0.0)
    number = number.to(row.dtype)
    if SCALED:
        made = tl.dot(number, row.T)
        if PAIRED:
            made += tl.dot(number, tl.load(x_low + x_at, mask=held, other=0.0).T) / 16.0
        sums += made * factor
    else:
        sums = tl.dot(number, row.T, sums)
        if PAIRED:
            low = tl.dot(number, tl.load(x_low + x_at, mask=held, other=0.0).T, low)
    return sums, low


@triton.jit
def step_of_four(sums, w, scale, more_scale, x, x_at, inside, held, EVEN_K: tl.constexpr):
    """Adds e2m1 weights times rows to sums [BN, BM]. w: pointers to packed bytes [BN, BK / 2].
    scale, more_scale: scales of low and high nibbles, for `widen_fp4`. x_at: offsets in a row of
    the inputs in low nibbles [BM, BK / 2]; those in high nibbles are 16 further on."""
    octets = tl.load(w) if EVEN_K else tl.load(w, mask=inside, other=0)
    row = tl.load(x + x_at, mask=held, other=0.0)
    low, high = widen_fp4(octets, scale, more_scale, row.dtype)
    sums = tl.dot(low, row.T, sums)
    return tl.dot(high, tl.load(x + x_at + 16, mask=held, other=0.0).T, sums)


@triton.jit
def step_of_integers(
    sums,
    w,
    zero,
    x,
    x_at,
    inside,
    held,
    factor,
    SCALED: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Adds (integers - zero points) times rows to sums [BN, BM]. KIND: FOUR: w are pointers to
    packed int4 [BN, BK / 2], and x_at is as in `step_of_four`; else w are pointers to int8 [BN,
    BK]. zero: pointers to zero points [BN], if ZEROS. factor: scales of this iteration [BN, 1], if
    SCALED."""
    octets = tl.load(w) if EVEN_K else tl.load(w, mask=inside, other=0)
    row = tl.load(x + x_at, mask=held, other=0.0)
    less = tl.full((w.shape[0], 1), 8.0 if KIND == FOUR else 0.0, tl.float32)
    if ZEROS:
        less = tl.load(zero)[:, None]
    made = tl.zeros_like(sums) if SCALED else sums
    if KIND == FOUR:
        low, high = widen_four(octets, less, less, row.dtype)
        made = tl.dot(low, row.T, made)
        made = tl.dot(high, tl.load(x + x_at + 16, mask=held, other=0.0).T, made)
    else:
        number = widen_eight(octets, KIND, row.dtype)
        if ZEROS:
            number -= less.to(row.dtype)
        made = tl.dot(number, row.T, made)
    return sums + made * factor if SCALED else made
