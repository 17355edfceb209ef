"""One step along K of an expert's product: weights times rows, added to transposed sums, [outputs,
rows]. The weights are plain or e4m3 (`step`), four-bit floats (`step_of_four`), or integers
(`step_of_integers`), widened on their way. Knows tiles; no experts."""

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
    """Adds weights [BN, BK] at pointers times rows [BM, BK] to sums [BN, BM]. factor: scale of this
    step (SCALED)."""
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
    """Adds bytes of two e2m1 numbers at pointers [BN, C] times rows to sums [BN, BM]. scale,
    more_scale: scales [BN, C] for `widen_fp4`. x_at: offsets of the first 16 of each 32 of a row
    [BM, C]."""
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
    """Adds (integers - zeros [BN]) times rows to sums [BN, BM]. KIND: FOUR: bytes of two numbers
    [BN, BK / 2], with x_at of the first 16 of each 32 of a row; else of one [BN, BK]. factor: scale
    of this step [BN, 1] (SCALED)."""
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
