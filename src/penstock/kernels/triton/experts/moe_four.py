"""Experts of a single token with weights in four-bit floats, by the method of
`linear/linear_four.py`: the row is in fixed point, e2m1 numbers are looked up and multiplied in
integers, without tensor cores. Weights are read once. Before them run

  fixed point   of the row (`fixed_row.py`)
  route         the choice of experts, and their weights (`moe_route.py`)

and then two launches:

  gate and up   a program has some outputs of one of the token's experts, and stores act(gate) * up
                in fixed point
  down          a program has some outputs of all the token's experts, and adds them up with their
                weights, so no launch for the sum is needed

The previous launch chooses the experts, so no weight can be loaded earlier. N: outputs of an
expert's matrix, K: inputs, R: outputs of a program, C: chunks of 32 weights of an output that an
iteration loads. Knows routes and matrices; no layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.expert_matrix import ExpertMatrix, Experts
from penstock.kernels.fixed_row import FIXED, FixedRow
from penstock.kernels.triton.elementwise.activation import GATES, gated
from penstock.kernels.triton.experts.moe_route import Routes
from penstock.kernels.triton.fixed_row import store_fixed
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.linear.linear_four import (
    ABOVE,
    Band,
    _first,
    _looked_up,
    _power,
    _row,
    _sixteen,
    _words,
)
from penstock.kernels.triton.linear.widen import WIDE
from penstock.kernels.triton.pdl import has_pdl, wait

MOST_UNROLLED = 24  # most iterations of the product with down


@triton.jit
def _weights(weight, scale, expert, n, N, chunk, there, K: tl.constexpr, PAIRS: tl.constexpr):
    """Loads chunks of an expert's packed weights and their scales. expert: [1, 1]. n: outputs [1,
    R] of N. chunk: [C, 1], with mask `there`. PAIRS: True: scales are pairs of bytes
    (`fp4_scales.in_pairs`); False: int32 words of four (`in_words`). Returns words [C, R, 4] int32,
    and scales of low and of high nibbles, float32 [C, R]: 2 ** -98 times the scales."""
    at = (expert.to(tl.int64) * N + n) * (K // 8) + chunk * 4
    words = tl.load(
        weight + at[:, :, None] + tl.arange(0, 4)[None, None, :], mask=there[:, :, None], other=0
    )
    if PAIRS:
        # two bytes a thread, as it has the weights: one int16 would be exchanged in shared memory
        pair = ((expert * tl.cdiv(K, 256) + chunk // 8) * N + n).to(tl.int64) * 16 + chunk % 8 * 2
        both = pair[:, :, None] + tl.arange(0, 2)[None, None, :]
        low, high = tl.split(_power(tl.load(scale + both, mask=there[:, :, None], other=0)))
    else:
        place = ((expert * tl.cdiv(K, 128) + chunk // 4) * N + n).to(tl.int64)
        word = tl.load(scale + place, mask=there, other=0)
        low = _power((word >> (chunk % 4 * 8)) & 255)
        high = low
    return words, low, high


@triton.jit
def _products(
    words,
    low_of,
    high_of,
    numbers,
    x_scale,
    x_sums,
    chunk,
    tables,
    C: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    EVEN: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Multiplies chunks of weights by the fixed-point row numbers, x_scale, x_sums. Other
    arguments: from `_weights` and `linear_four._first`. Returns float32 [C, R], 2 ** -33 times the
    sums of products."""
    low_words, high_words = _looked_up(_words(words, C, R), tables, PLAIN)
    high, low, x_of, total = _row(numbers, x_scale, x_sums, chunk * 2, C, K, EVEN)
    part = _sixteen(low_words, high, low, total * -ABOVE, PLAIN)
    # the factor is 2 ** 64; twice each e2m1 number was looked up
    sums = part.to(tl.float32) * (low_of * (x_of * 18446744073709551616.0))
    high, low, x_of, total = _row(numbers, x_scale, x_sums, chunk * 2 + 1, C, K, EVEN)
    part = _sixteen(high_words, high, low, total * -ABOVE, PLAIN)
    return sums + part.to(tl.float32) * (high_of * (x_of * 18446744073709551616.0))


@triton.jit
def _gate_up_of_four(
    numbers,
    x_scale,
    x_sums,
    weight,
    scale,
    by,
    bias,
    chosen,
    out,
    out_scale,
    out_sums,
    F,
    slope,
    most,
    K: tl.constexpr,
    HALF: tl.constexpr,
    C: tl.constexpr,
    PAIRS: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Writes act(gate) * up of each of the token's experts, F numbers in fixed point. numbers,
    x_scale, x_sums: the token's row. weight: int32 [E, N, K / 8], N: 2 F, or F without a gate. by:
    [E, N] float32. bias: [E, N], if HAS_BIAS. chosen: experts. out, out_scale, out_sums: fields of
    FixedRow, a row for each choice. slope, most: of `Experts.clamp`, if CLAMPED. HALF: numbers that
    a program stores. GATED: kind of gate (`activation.gated`); 0: max(up, 0) squared is written.
    PAIRS: see `_weights`."""
    R: tl.constexpr = 2 * HALF if GATED else HALF
    CHUNKS: tl.constexpr = K // 32
    EVEN: tl.constexpr = CHUNKS % C == 0
    PLAIN: tl.constexpr = tl.float32 == WIDE  # in Triton's interpreter
    N = 2 * F if GATED else F
    lane, place = tl.arange(0, C)[:, None], tl.arange(0, R)
    n = tl.minimum(tl.program_id(0) * HALF + place % HALF, F - 1) + place // HALF * F
    tables = _first(F, PLAIN)
    wait(EARLY)
    pair = tl.program_id(1)
    expert = tl.load(chosen + pair)
    one = expert + tl.zeros((1, 1), tl.int32)
    w, low, high = _weights(weight, scale, one, n[None, :], N, lane, lane < CHUNKS, K, PAIRS)
    sums = tl.zeros((C, R), tl.float32)
    for first in tl.static_range(0, CHUNKS, C):
        chunk = first + lane
        ahead, ahead_low, ahead_high = _weights(
            weight, scale, one, n[None, :], N, chunk + C, chunk + C < CHUNKS, K, PAIRS
        )
        sums += _products(
            w, low, high, numbers, x_scale, x_sums, chunk, tables, C, R, K, EVEN, PLAIN
        )
        w, low, high = ahead, ahead_low, ahead_high
    row = expert.to(tl.int64) * N + n
    answer = tl.sum(sums, axis=0) * (tl.load(by + row) * 8589934592.0)  # 2 ** 33
    if HAS_BIAS:
        answer += tl.load(bias + row).to(tl.float32)
    if GATED:
        gate, up = tl.split(answer.reshape(2, HALF).permute(1, 0))
        if CLAMPED:
            gate, up = tl.minimum(gate, most), tl.minimum(tl.maximum(up, -most), most) + 1.0
        made = gated(gate, slope, GATED) * up
    else:
        made = tl.maximum(answer, 0.0) * tl.maximum(answer, 0.0)
    own = tl.program_id(0) * HALF + tl.arange(0, HALF)
    values = tl.where(own < F, made.to(WIDE).to(tl.float32), 0.0).reshape(HALF // 16, 16)
    block = tl.program_id(0) * (HALF // 16) + tl.arange(0, HALF // 16)
    beside = pair * (F // 16)
    store_fixed(
        values, out + pair * 2 * F, out_scale + beside, out_sums + beside, block, block * 16 < F, F
    )


@triton.jit
def _down_of_four(
    numbers,
    x_scale,
    x_sums,
    weight,
    scale,
    by,
    bias,
    chosen,
    weights,
    out,
    N,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Writes out [N], the weighted sum of the experts' outputs. numbers, x_scale, x_sums: TOP_K
    fixed-point rows, from `_gate_up_of_four`. weights: [TOP_K], of the token's experts. Other
    arguments: see `_gate_up_of_four`."""
    CHUNKS: tl.constexpr = K // 32
    EVEN: tl.constexpr = CHUNKS % C == 0
    EACH: tl.constexpr = (CHUNKS + C - 1) // C  # iterations for one expert
    PLAIN: tl.constexpr = tl.float32 == out.dtype.element_ty
    lane = tl.arange(0, C)[:, None]
    own = tl.program_id(0) * R + tl.arange(0, R)
    n = tl.minimum(own, N - 1)
    tables = _first(N, PLAIN)
    wait(EARLY)
    one = tl.load(chosen) + tl.zeros((1, 1), tl.int32)
    w, low, high = _weights(weight, scale, one, n[None, :], N, lane, lane < CHUNKS, K, PAIRS)
    answer = tl.zeros((R,), tl.float32)
    sums = tl.zeros((C, R), tl.float32)
    for turn in tl.static_range(TOP_K * EACH):
        pair = turn // EACH
        chunk, ahead_chunk = turn % EACH * C + lane, (turn + 1) % EACH * C + lane
        one = tl.load(chosen + (turn + 1) // EACH % TOP_K) + tl.zeros((1, 1), tl.int32)
        there = (ahead_chunk < CHUNKS) & (turn + 1 < TOP_K * EACH)
        ahead, ahead_low, ahead_high = _weights(
            weight, scale, one, n[None, :], N, ahead_chunk, there, K, PAIRS
        )
        sums += _products(
            w,
            low,
            high,
            numbers + pair * (K // 4),
            x_scale + pair * (K // 16),
            x_sums + pair * (K // 16),
            chunk,
            tables,
            C,
            R,
            K,
            EVEN,
            PLAIN,
        )
        w, low, high = ahead, ahead_low, ahead_high
        if turn % EACH == EACH - 1:
            row = tl.load(chosen + pair).to(tl.int64) * N + n
            made = tl.sum(sums, axis=0) * (tl.load(by + row) * 8589934592.0)  # 2 ** 33
            if HAS_BIAS:
                made += tl.load(bias + row).to(tl.float32)
            answer += made * tl.load(weights + pair)
            sums = tl.zeros((C, R), tl.float32)
    tl.store(out + own, answer.to(out.dtype.element_ty), mask=own < N)


def takes_four(of: Experts) -> bool:
    """Returns True if these kernels support the experts: four-bit floats, whose rows can be in
    fixed point, and so few that the loop over them can be unrolled whole."""
    _, d, inner = of.shape
    fits = of.gate_up.in_fp4 and of.down.in_fp4 and d % 32 == 0 and inner % 32 == 0
    return fits and of.top_k * cdiv(inner // 32, bands_of(of)[1].chunks) <= MOST_UNROLLED


def bands_of(of: Experts) -> tuple[Band, Band]:
    """Returns the division into programs of the product with gate and up, and of that with down,
    whose loops are unrolled whole."""
    _, d, inner = of.shape
    first, second = (min(32, next_power_of_2(inputs // 32)) for inputs in (d, inner))
    return Band(16, first, 8, 1), Band(8, second, 4, 1)


def one_token_of_four(
    row: FixedRow, routes: Routes, of: Experts, bands: tuple[Band, Band] | None = None
) -> Tensor:
    """Returns the weighted sum of the experts' outputs, [1, d]. row: x [1, d]. routes: of x,
    without sorting. of: as `moe.prepare_experts` leaves it. bands: None: see `bands_of`."""
    (_, d, inner), (first, second) = of.shape, bands or bands_of(of)
    device, early, slope, most = routes.chosen.device, has_pdl(routes.chosen.device), 1.0, 0.0
    if of.clamp is not None:
        slope, most = of.clamp
    middle = FixedRow(
        torch.empty((of.top_k, 2, inner), dtype=torch.int8, device=device),
        torch.empty((of.top_k, inner // FIXED), dtype=torch.float32, device=device),
        torch.empty((of.top_k, inner // FIXED), dtype=torch.int32, device=device),
    )
    out = torch.empty((1, d), dtype=of.dtype, device=device)
    _gate_up_of_four[(cdiv(inner, first.outputs), of.top_k)](
        row.numbers.view(torch.int64),
        row.scale,
        row.sums,
        *_arrays(of.gate_up),
        routes.chosen,
        middle.numbers,
        middle.scale,
        middle.sums,
        inner,
        slope,
        most,
        K=d,
        HALF=first.outputs,
        C=first.chunks,
        PAIRS=of.gate_up.scales == 3,
        GATED=GATES[of.gate],
        CLAMPED=of.clamp is not None,
        HAS_BIAS=of.gate_up.bias is not None,
        WIDE=WIDE[of.dtype],
        EARLY=early,
        num_warps=first.warps,
        launch_pdl=bool(early),
    )
    _down_of_four[(cdiv(d, second.outputs),)](
        middle.numbers.view(torch.int64),
        middle.scale,
        middle.sums,
        *_arrays(of.down),
        routes.chosen,
        routes.weights,
        out,
        d,
        K=inner,
        TOP_K=of.top_k,
        R=second.outputs,
        C=second.chunks,
        PAIRS=of.down.scales == 3,
        HAS_BIAS=of.down.bias is not None,
        EARLY=early,
        num_warps=second.warps,
        launch_pdl=bool(early),
    )
    return out


def _arrays(matrix: ExpertMatrix) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns four arguments of the kernels: packed weights, scales, factors of rows, and biases
    (without any a tensor that is not read)."""
    assert matrix.scale is not None and matrix.whole is not None
    scale = matrix.scale.view(torch.uint8) if matrix.scales == 3 else matrix.scale
    bias = matrix.whole if matrix.bias is None else matrix.bias
    return matrix.numbers.view(torch.int32), scale, matrix.whole, bias
