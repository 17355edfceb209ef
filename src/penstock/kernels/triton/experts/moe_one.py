"""Experts of a single token, without tensor cores, for unquantized and float8 weights. A program
computes a few outputs, and weights are read once.

  gate and up   a program has some outputs of one of the token's experts
  down          a program has some outputs of all the token's experts, and adds them up with their
                weights, so no launch for the sum is needed

The previous launch chooses the experts, so no weight can be loaded earlier. A program starts all
its loads before it uses any result: products are accumulated separately for each of BK positions,
and these are added up only at the end. N: outputs, K: inputs. Knows routes and matrices; no layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.expert_matrix import ExpertMatrix, Experts
from penstock.kernels.fp8_rows import FP8_GROUP
from penstock.kernels.triton.elementwise.activation import GATES, both, gated
from penstock.kernels.triton.experts.moe_route import Routes
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.pdl import has_pdl, wait

GROUP = tl.constexpr(FP8_GROUP)
# Numbers that are adjacent in a thread, for weights and row alike, whatever their dtypes. So each
# thread loads the row's numbers that it needs, and nothing is exchanged through shared memory.
SPAN = tl.constexpr(8)


@triton.jit
def _products(
    w, scale, x, BN: tl.constexpr, BK: tl.constexpr, K: tl.constexpr, SCALES: tl.constexpr
):
    """Multiplies BN rows of weights by a row x [K]. w: pointers [BN]. Returns float32 [BN, BK]; the
    sum over BK is the product. SCALES: 2: scale [BN] are pointers to scales, each for GROUP inputs,
    a multiple of BK; else weights are not scaled here."""
    lane = tl.max_contiguous(tl.arange(0, BK), SPAN)[None, :]
    same = tl.zeros((BN, 1), tl.int32)
    sums = tl.zeros((BN, BK), tl.float32)
    for at in tl.static_range(0, K, BK):
        row_at, w_at = x + at + lane + same, w[:, None] + at + lane
        if K % BK == 0:
            row, number = tl.load(row_at), tl.load(w_at)
        else:
            inside = at + lane + same < K
            row, number = (
                tl.load(row_at, mask=inside, other=0.0),
                tl.load(w_at, mask=inside, other=0.0),
            )
        made = number.to(tl.float32) * row.to(tl.float32)
        sums += made * tl.load(scale + at // GROUP)[:, None] if SCALES == 2 else made
    return sums


@triton.jit
def _gate_up(
    x,
    w,
    scale,
    chosen,
    out,
    N,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SCALES: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Writes act(gate) * up of each of the token's experts. x: [K]. chosen: experts. out: [pairs,
    N]. GATED: kind of gate (`activation.gated`); 0: out is max(up, 0) squared. SCALES: 0 no scales,
    1 one per row of the weight, 2 one for each GROUP inputs."""
    wait(EARLY)
    pair, n = tl.program_id(1), tl.program_id(0) * BN + tl.arange(0, BN)
    gate_row = tl.load(chosen + pair).to(tl.int64) * (2 * N if GATED else N) + tl.minimum(n, N - 1)
    EACH: tl.constexpr = (K + GROUP - 1) // GROUP
    gates = _products(w + gate_row * K, scale + gate_row * EACH, x, BN, BK, K, SCALES)
    if GATED:
        up_row = gate_row + N
        ups = _products(w + up_row * K, scale + up_row * EACH, x, BN, BK, K, SCALES)
        gate, up = tl.reduce((gates, ups), 1, both)
        if SCALES == 1:
            gate *= tl.load(scale + gate_row)
            up *= tl.load(scale + up_row)
        made = gated(gate, 1.0, GATED) * up
    else:
        only = tl.sum(gates, axis=1)
        if SCALES == 1:
            only *= tl.load(scale + gate_row)
        made = only * tl.maximum(only, 0.0)
    tl.store(out + pair * N + n, made.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _down(
    middle,
    w,
    scale,
    chosen,
    weights,
    out,
    N,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SCALES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Writes out [N], the weighted sum of the experts' outputs. middle: [TOP_K, K], the result of
    `_gate_up`. chosen, weights: [TOP_K]. SCALES: see `_gate_up`."""
    wait(EARLY)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    EACH: tl.constexpr = (K + GROUP - 1) // GROUP
    sums = tl.zeros((BN, BK), tl.float32)
    for pair in tl.static_range(TOP_K):
        row = tl.load(chosen + pair).to(tl.int64) * N + tl.minimum(n, N - 1)
        made = _products(w + row * K, scale + row * EACH, middle + pair * K, BN, BK, K, SCALES)
        by = tl.zeros((BN,), tl.float32) + tl.load(weights + pair)
        if SCALES == 1:
            by *= tl.load(scale + row)
        sums += made * by[:, None]
    tl.store(out + n, tl.sum(sums, axis=1).to(out.dtype.element_ty), mask=n < N)


@dataclass(slots=True, frozen=True)
class OneCut:
    """The division of a product of a single token's experts into programs."""

    outputs: int  # outputs of a program, of gate and of up each
    inputs: int  # inputs (elements along K) that an iteration loads
    warps: int


def takes_one(of: Experts) -> bool:
    """Returns True if these kernels support the experts: weights are unquantized, or float8 with
    scales by row or block, and have no biases."""
    both = (of.gate_up, of.down)
    return of.clamp is None and not any(
        each.bias is not None or each.integers or each.in_fp4 for each in both
    )


def cuts_of(of: Experts) -> tuple[OneCut, OneCut]:
    """Returns the division into programs of the product with gate and up, and of that with down.
    Of some 40 each, they are the fastest for six models' experts on an H200, or within 4 % of it."""
    _, d, inner = of.shape
    by_group = OneCut(2, FP8_GROUP, 1)
    eight = of.gate_up.in_eight_bits
    first = OneCut(2 if eight else 1, min(1024, _lanes(d)), 1)
    second = OneCut(2, min(256, _lanes(inner)), 2)
    if not of.down.in_eight_bits:
        second = OneCut(2, min(128, _lanes(inner)), 1)
    return by_group if of.gate_up.by_group else first, by_group if of.down.by_group else second


def _lanes(size: int) -> int:
    return max(16, next_power_of_2(size))


def one_token(
    x: Tensor, routes: Routes, of: Experts, cuts: tuple[OneCut, OneCut] | None = None
) -> Tensor:
    """Returns the weighted sum of the experts' outputs, [1, d]. x: [1, d]. routes: of x, without
    sorting. cuts: None: see `cuts_of`."""
    (_, d, inner), (first, second) = of.shape, cuts or cuts_of(of)
    middle = torch.empty((of.top_k, inner), dtype=x.dtype, device=x.device)
    out, early = torch.empty_like(x), has_pdl(x.device)
    _gate_up[(cdiv(inner, first.outputs), of.top_k)](
        x,
        of.gate_up.numbers,
        _scale(of.gate_up, x),
        routes.chosen,
        middle,
        inner,
        K=d,
        BN=first.outputs,
        BK=first.inputs,
        SCALES=of.gate_up.scales,
        GATED=GATES[of.gate],
        EARLY=early,
        num_warps=first.warps,
        launch_pdl=bool(early),
    )
    _down[(cdiv(d, second.outputs),)](
        middle,
        of.down.numbers,
        _scale(of.down, x),
        routes.chosen,
        routes.weights,
        out,
        d,
        K=inner,
        TOP_K=of.top_k,
        BN=second.outputs,
        BK=second.inputs,
        SCALES=of.down.scales,
        EARLY=early,
        num_warps=second.warps,
        launch_pdl=bool(early),
    )
    return out


def _scale(matrix: ExpertMatrix, other: Tensor) -> Tensor:
    return other if matrix.scale is None else matrix.scale
