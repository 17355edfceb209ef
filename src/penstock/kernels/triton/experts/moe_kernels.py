"""Kernels of the experts' products and of the sum over a token's experts. Rows are sorted by
expert, and a tile has rows of one expert. `moe.py` launches the kernels and has the letters."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.elementwise.activation import gated
from penstock.kernels.triton.experts.moe_steps import step, step_of_four, step_of_integers
from penstock.kernels.triton.linear.fp8 import store_fp8
from penstock.kernels.triton.linear.widen import FOUR
from penstock.kernels.triton.pdl import wait


@triton.jit
def _scales_of_four(w_scale, expert, n, every, at, K, W_SCALES: tl.constexpr, BK: tl.constexpr):
    """Loads the scales of an expert's e2m1 weights. n: outputs [BN], of `every`. at: first of BK
    inputs. Returns two int32 tensors [BN, BK / 2], whose lowest byte is the scale of a weight
    byte's low nibble and of its high nibble, as `step_of_four` needs.

    Each thread loads int32 words and shifts out the scales of the weights that it widens. If it
    loaded one scale per byte, they would be rearranged through shared memory (gpt-oss-20b, 1,000
    tokens: 1,030 us, with words 784)."""
    if W_SCALES == 3:
        WORDS: tl.constexpr = BK // 64
        octet = tl.arange(0, BK // 2)[None, :]
        first = (
            w_scale
            + ((expert.to(tl.int64) * tl.cdiv(K, 256) + at // 256) * every + n) * 4
            + at % 256 // 64
        )
        word = tl.load(first)[:, None]
        for other in tl.static_range(1, WORDS):
            word = tl.where(octet // 32 == other, tl.load(first + other)[:, None], word)
        scale = word >> (octet % 32 // 16 * 16)
        more_scale = scale >> 8
    else:
        word = tl.load(w_scale + (expert.to(tl.int64) * tl.cdiv(K, 128) + at // 128) * every + n)
        scale = word[:, None] >> ((at % 128 // 32 + tl.arange(0, BK // 2) // 16) * 8)[None, :]
        more_scale = scale
    return scale, more_scale


@triton.jit
def _tile(
    x,
    x_low,
    x_scale,
    w,
    w_scale,
    w_more,
    bias,
    out,
    out_low,
    out_scale,
    pairs,
    expert,
    first,
    rows,
    block,
    N,
    K,
    slope,
    most,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    FIRST: tl.constexpr,
    GATED: tl.constexpr,
    SORTED: tl.constexpr,
    W_SCALES: tl.constexpr,
    X_SCALES: tl.constexpr,
    PAIRED: tl.constexpr,
    INTEGERS: tl.constexpr,
    ZEROS: tl.constexpr,
    FP8: tl.constexpr,
    WIDE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    WG: tl.constexpr,
    XG: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes BN outputs of one expert for BM slots from slot `first` on. Only the first `rows`
    slots belong to the expert. block: the program's index along N. Other arguments: see `_grouped`.
    """
    m, n, lane = tl.arange(0, BM), block * BN + tl.arange(0, BN), tl.arange(0, BK)
    real = m < rows
    slot = (first + m).to(tl.int64)
    pair = tl.load(pairs + slot, mask=real, other=0).to(tl.int64) if SORTED else slot
    source = pair // TOP_K if FIRST else slot
    # row of the matrices of all experts, seen as one matrix
    matrix = expert.to(tl.int64) * (2 * N if GATED else N) + tl.minimum(n, N - 1)
    FLOATS: tl.constexpr = W_SCALES >= 3
    HALVES: tl.constexpr = 2 if FLOATS or INTEGERS == FOUR else 1
    octet = tl.arange(0, BK // 2)
    if HALVES == 2:
        w_row, below = (
            w + matrix[:, None] * (K // 2) + octet[None, :],
            tl.cast(N, tl.int64) * (K // 2),
        )
        lane = octet // 16 * 32 + octet % 16
    else:
        w_row, below = w + matrix[:, None] * K + lane[None, :], tl.cast(N, tl.int64) * K
    x_row = source[:, None] * K + lane[None, :]
    sums, low = tl.zeros((BN, BM), tl.float32), tl.zeros((BN, BM), tl.float32)
    up, up_low = tl.zeros((BN, BM), tl.float32), tl.zeros((BN, BM), tl.float32)
    SCALED: tl.constexpr = (W_SCALES == 2) | (X_SCALES == 2)
    for at in tl.range(0, K, BK, num_stages=STAGES):
        inside = (at + lane < K)[None, :]
        held = real[:, None] if EVEN_K else real[:, None] & inside
        if INTEGERS > 0:
            of_w = (expert.to(tl.int64) * tl.cdiv(K, WG) + at // WG) * (
                2 * N if GATED else N
            ) + tl.minimum(n, N - 1)
            w_factor, up_factor = 1.0, 1.0
            if SCALED:
                w_factor = tl.load(w_scale + of_w)[:, None]
                if GATED:
                    up_factor = tl.load(w_scale + of_w + N)[:, None]
            sums = step_of_integers(
                sums,
                w_row + at // HALVES,
                w_more + of_w,
                x,
                x_row + at,
                inside,
                held,
                w_factor,
                SCALED,
                INTEGERS,
                ZEROS,
                EVEN_K,
            )
            if GATED:
                up = step_of_integers(
                    up,
                    w_row + below + at // HALVES,
                    w_more + of_w + N,
                    x,
                    x_row + at,
                    inside,
                    held,
                    up_factor,
                    SCALED,
                    INTEGERS,
                    ZEROS,
                    EVEN_K,
                )
        elif FLOATS:
            every, real_n = 2 * N if GATED else N, tl.minimum(n, N - 1)
            scale, more_scale = _scales_of_four(w_scale, expert, real_n, every, at, K, W_SCALES, BK)
            sums = step_of_four(
                sums,
                w_row + at // 2,
                scale,
                more_scale,
                x,
                x_row + at,
                inside,
                held,
                EVEN_K,
            )
            if GATED:
                scale, more_scale = _scales_of_four(
                    w_scale, expert, real_n + N, every, at, K, W_SCALES, BK
                )
                up = step_of_four(
                    up,
                    w_row + below + at // 2,
                    scale,
                    more_scale,
                    x,
                    x_row + at,
                    inside,
                    held,
                    EVEN_K,
                )
        else:
            factor = 1.0
            if X_SCALES == 2:
                factor = tl.load(
                    x_scale + source * tl.cdiv(K, XG) + at // XG, mask=real, other=0.0
                )[None, :]
            w_factor, up_factor = factor, factor
            if W_SCALES == 2:
                of_w = w_scale + matrix * tl.cdiv(K, WG) + at // WG
                w_factor = factor * tl.load(of_w)[:, None]
                if GATED:
                    up_factor = factor * tl.load(of_w + N * tl.cdiv(K, WG))[:, None]
            sums, low = step(
                sums,
                low,
                w_row + at,
                x,
                x_low,
                x_row + at,
                inside,
                held,
                w_factor,
                SCALED,
                PAIRED,
                EVEN_K,
            )
            if GATED:
                up, up_low = step(
                    up,
                    up_low,
                    w_row + below + at,
                    x,
                    x_low,
                    x_row + at,
                    inside,
                    held,
                    up_factor,
                    SCALED,
                    PAIRED,
                    EVEN_K,
                )
    if PAIRED and not SCALED:
        sums += low / 16.0
        up += up_low / 16.0
    if X_SCALES == 1:
        of_row = tl.load(x_scale + source, mask=real, other=0.0)[None, :]
        sums *= of_row
        up *= of_row
    if (W_SCALES == 1) | FLOATS:
        of_rows = w_more if FLOATS else w_scale
        sums *= tl.load(of_rows + matrix)[:, None]
        if GATED:
            up *= tl.load(of_rows + matrix + N)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + matrix).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + matrix + N).to(tl.float32)[:, None]
    there = (n < N)[None, :] & real[:, None]
    if FIRST:
        if CLAMPED:
            sums, up = tl.minimum(sums, most), tl.minimum(tl.maximum(up, -most), most) + 1.0
        positive = tl.maximum(sums, 0.0)
        value = tl.trans(gated(sums, slope, GATED) * up if GATED else positive * positive).to(WIDE)
        at_slot = slot[:, None] * N + n[None, :]
        if FP8 > 0:
            scale_at = slot[:, None] * tl.num_programs(0) + block
            store_fp8(
                tl.where(there, value, 0.0),
                out,
                out_low,
                out_scale,
                at_slot,
                there,
                scale_at,
                real[:, None],
                FP8,
            )
        else:
            tl.store(out + at_slot, value, mask=there)
    else:
        tl.store(out + pair[:, None] * N + n[None, :], tl.trans(sums).to(WIDE), mask=there)


@triton.jit
def _grouped(
    x,
    x_low,
    x_scale,
    w,
    w_scale,
    w_more,
    bias,
    out,
    out_low,
    out_scale,
    pairs,
    tiles,
    chosen,
    N,
    K,
    slope,
    most,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    FIRST: tl.constexpr,
    GATED: tl.constexpr,
    SORTED: tl.constexpr,
    W_SCALES: tl.constexpr,
    X_SCALES: tl.constexpr,
    PAIRED: tl.constexpr,
    INTEGERS: tl.constexpr,
    ZEROS: tl.constexpr,
    FP8: tl.constexpr,
    WIDE: tl.constexpr,
    BM: tl.constexpr,
    FEW: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    WG: tl.constexpr,
    XG: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Kernel of both products. One program per tile of rows and block of BN outputs.

    FIRST: True: the product with gate and up: x has a row per token, out a row per slot. False: the
    product with down: x has a row per slot, out a row per pair. GATED: kind of gate
    (`activation.gated`), with N outputs of gate and N of up; 0: up alone. W_SCALES, X_SCALES:
    scales of weights and of x: 0 none, 1 one per row, 2 one for WG (XG) inputs, a multiple of BK
    (XG is read for 2 alone); 3 and 4: e2m1 weights, with scales from `in_pairs` (3) or `in_words`
    (4) of `fp4_scales.py` and w_more [E, outputs], the factors of rows. INTEGERS: `widen.FOUR` or
    `widen.EIGHT` for integer weights, else 0. Integers have scales [E, K / WG, outputs], and if
    ZEROS zero points in w_more. FEW: tiles of at most this many rows, the last of an expert, are
    computed with BM = FEW."""
    wait(EARLY)
    tile, block = tl.program_id(1), tl.program_id(0)
    if SORTED:
        expert, first, rows = (
            tl.load(tiles + 3 * tile),
            tl.load(tiles + 3 * tile + 1),
            tl.load(tiles + 3 * tile + 2),
        )
    else:
        expert, first, rows = tl.load(chosen + tile), tile, 1
    if rows > FEW:
        _tile(
            x,
            x_low,
            x_scale,
            w,
            w_scale,
            w_more,
            bias,
            out,
            out_low,
            out_scale,
            pairs,
            expert,
            first,
            rows,
            block,
            N,
            K,
            slope,
            most,
            TOP_K,
            HAS_BIAS,
            CLAMPED,
            FIRST,
            GATED,
            SORTED,
            W_SCALES,
            X_SCALES,
            PAIRED,
            INTEGERS,
            ZEROS,
            FP8,
            WIDE,
            BM,
            BN,
            BK,
            WG,
            XG,
            EVEN_K,
            STAGES,
        )
    elif FEW > 0:  # noqa: SIM102 - only FEW is known when this is compiled
        if rows > 0:
            _tile(
                x,
                x_low,
                x_scale,
                w,
                w_scale,
                w_more,
                bias,
                out,
                out_low,
                out_scale,
                pairs,
                expert,
                first,
                rows,
                block,
                N,
                K,
                slope,
                most,
                TOP_K,
                HAS_BIAS,
                CLAMPED,
                FIRST,
                GATED,
                SORTED,
                W_SCALES,
                X_SCALES,
                PAIRED,
                INTEGERS,
                ZEROS,
                FP8,
                WIDE,
                FEW,
                BN,
                BK,
                WG,
                XG,
                EVEN_K,
                STAGES,
            )
