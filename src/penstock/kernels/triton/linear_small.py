"""Products of 1 to 16 rows: x [M, K] @ W[N, K]^T. Reading W is all the time there is, so W is streamed once.

A program takes a few outputs and a stretch of K, on tensor cores (x is padded to 16 rows). Where one wave of programs
would be short, K is split: the parts leave float32 sums, and whoever comes last at a counter adds them up in order, so
that the result doesn't depend on who that is. It knows a matrix and rows; no layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 16


@triton.jit
def _linear_small(
    x, weight, bias, out, parts, arrived, M, N, K, each,
    BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block, part = tl.program_id(0), tl.program_id(1)
    n = block * BN + tl.arange(0, BN)
    m = tl.arange(0, 16)
    lane = tl.arange(0, BK)
    w_row = weight + (n if EVEN_N else tl.minimum(n, N - 1))[:, None].to(tl.int64) * K
    x_row = x + m[:, None] * K
    sums = tl.zeros((16, BN), tl.float32)
    for at in tl.range(part * each, tl.minimum(part * each + each, K), BK, num_stages=STAGES):
        k = at + lane
        if EVEN_K:
            w = tl.load(w_row + k[None, :], eviction_policy="evict_first")
            rows = tl.load(x_row + k[None, :], mask=(m < M)[:, None], other=0.0)
        else:
            w = tl.load(w_row + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
            rows = tl.load(x_row + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        sums = tl.dot(rows, w.T, sums)
    place = m[:, None] * N + n[None, :]
    there = (m < M)[:, None] & (n < N)[None, :]
    if SPLIT > 1:
        tl.store(parts + part * 16 * N + place, sums, mask=there)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + block, 1, sem="acq_rel") == SPLIT - 1
        if last:
            sums = tl.zeros((16, BN), tl.float32)
            for other in range(SPLIT):
                sums += tl.load(parts + other * 16 * N + place, mask=there, other=0.0, cache_modifier=".cg")
            tl.store(arrived + block, 0)
            if HAS_BIAS:
                sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            tl.store(out + place, sums.to(out.dtype.element_ty), mask=there)
    else:
        if HAS_BIAS:
            sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=there)


@dataclass(slots=True, frozen=True)
class Cut:
    """How a product is cut into programs."""

    outputs: int  # of a program
    inputs: int  # at once
    split: int  # programs along K
    warps: int
    stages: int


def cut_of(n: int, k: int) -> Cut:
    """Measured on an H200 (docs/kernels.md): the widest programs of which there still are a few a multiprocessor."""
    if n >= 8192:
        return Cut(32, 256, 1, 4, 4)
    return Cut(16, 256, 4 if k >= 8192 else 2, 4, 4)


class SmallLinear:
    """Scratch of such products on one device, shared by all weights: calls must follow one another on one stream."""

    def __init__(self, most_outputs: int, device: torch.device, most_split: int = 8) -> None:
        self._parts = torch.empty(most_split * MOST_ROWS * most_outputs, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(triton.cdiv(most_outputs, 16), dtype=torch.int32, device=device)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, cut: Cut | None = None) -> Tensor:
        """x [M, K] contiguous, 1 <= M <= 16, weight [N, K] contiguous, bias [N] -> [M, N] of x's dtype."""
        (m, k), n = x.shape, weight.shape[0]
        cut = cut or cut_of(n, k)
        assert m <= MOST_ROWS and x.is_contiguous() and weight.is_contiguous()
        assert cut.split == 1 or cut.split * MOST_ROWS * n <= self._parts.numel(), "made for fewer outputs"
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
        each = triton.cdiv(triton.cdiv(k, cut.split), cut.inputs) * cut.inputs
        split = triton.cdiv(k, each)
        _linear_small[(triton.cdiv(n, cut.outputs), split)](
            x, weight, x if bias is None else bias, out, self._parts, self._arrived, m, n, k, each,
            BN=cut.outputs, BK=cut.inputs, SPLIT=split, HAS_BIAS=bias is not None, EVEN_K=k % cut.inputs == 0,
            EVEN_N=n % cut.outputs == 0, STAGES=cut.stages, num_warps=cut.warps,
        )  # fmt: skip
        return out
