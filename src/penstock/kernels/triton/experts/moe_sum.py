"""The last part of experts: sums over a token's experts, and the output of a shared expert. T:
tokens, k: experts per token, d: hidden size. Knows rows; no weight of an expert."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.expert_matrix import Experts, SharedOutput
from penstock.kernels.triton.elementwise.activation import add_opened, opened_of
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.pdl import early_of, release, wait


@triton.jit
def _summed(
    made,
    weights,
    out,
    counts,
    experts,
    d,
    shared,
    x,
    gate,
    scale,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds up a token's K weighted rows, in order, and resets the experts' counts to zero. made: [T
    * K, d]. weights: [T, K]. counts: [experts]. SHARED: the output of a shared expert is added to
    the rounded sum: shared [T, d], gate, scale: see SharedOutput; x [T, d]. GATED: it has a gate;
    a program has a whole row then."""
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = 0.0
    if GATED:
        # loaded before `wait`, since weights are constant
        weight = tl.load(gate + column, mask=column < d, other=0.0).to(tl.float32)
    wait(EARLY)
    release(EARLY)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(made + (token * K + j) * d + column, mask=column < d, other=0.0).to(
            tl.float32
        )
        total += row * tl.load(weights + token * K + j)
    if SHARED:
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total += opened_of(shared, x, weight, scale, token * d + column, column < d, GATED)
    tl.store(out + token * d + column, total.to(out.dtype.element_ty), mask=column < d)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        for at in range(0, experts, BLOCK):
            lane = at + tl.arange(0, BLOCK)
            tl.store(counts + lane, tl.zeros((BLOCK,), tl.int32), mask=lane < experts)


def add_up(
    made: Tensor,
    weights: Tensor,
    out: Tensor,
    counts: Tensor,
    of: Experts,
    x: Tensor,
    shared: SharedOutput | None,
) -> None:
    """Writes out [T, d], the weighted sums of the experts' outputs made [T * k, d], plus the output
    of a shared expert for x [T, d]. weights: [T, k]. counts: [experts], set to zero."""
    tokens, d = out.shape
    assert x.is_contiguous()
    gate = None if shared is None else shared.gate
    block = next_power_of_2(d) if gate is not None else min(1024, next_power_of_2(d))
    grid = (tokens, cdiv(d, block))
    early = early_of(x.device, grid[0] * grid[1])
    _summed[grid](
        made,
        weights,
        out,
        counts,
        of.shape[0],
        d,
        made if shared is None else shared.made(),
        x,
        x if gate is None else gate,
        1.0 if shared is None else shared.scale,
        K=of.top_k,
        SHARED=shared is not None,
        GATED=gate is not None,
        EARLY=early,
        BLOCK=block,
        num_warps=max(4, min(8, block // 256)),
        launch_pdl=bool(early),
    )


def with_shared(out: Tensor, shared: SharedOutput | None, x: Tensor) -> Tensor:
    """Returns out [T, d] plus the output of a shared expert for x [T, d], in a launch of its
    own."""
    if shared is None:
        return out
    return add_opened(out, shared.made(), x, shared.gate, shared.scale)
