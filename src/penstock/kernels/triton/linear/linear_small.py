"""Products of 1 to 16 rows with a weight. They are x [M, K] @ W[N, K]^T. The time is that of
reading W, so W is read once.

A program computes a few outputs over a range of K, on tensor cores (x is padded to 16 rows). If
there would be too few programs to keep the GPU busy, K is divided among several. They write float32
sums, and the last one to finish, as a counter tells, adds all sums in a fixed order. So the result
doesn't depend on which program is last. Knows a matrix and rows; no layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.grid import cdiv
from penstock.kernels.triton.pdl import has_pdl, release, wait

MOST_ROWS = 16


@triton.jit(do_not_specialize=["M"])
def _linear_small(
    x,
    weight,
    bias,
    out,
    parts,
    arrived,
    M,
    N,
    K,
    x_stride,
    each,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Kernel of `linear_small`. A program computes BN outputs of all M rows, over one of SPLIT
    parts of K, BK inputs at a time. parts, arrived: fields of SmallWeight. each: inputs of a part
    of K. x_stride: between rows of x. EVEN_K, EVEN_N: True: no mask is needed along K or N. EARLY:
    see pdl.py."""
    release(EARLY)
    block, part = tl.program_id(0), tl.program_id(1)
    n = block * BN + tl.arange(0, BN)
    m = tl.arange(0, 16)
    lane = tl.arange(0, BK)
    w_row = weight + (n if EVEN_N else tl.minimum(n, N - 1))[:, None].to(tl.int64) * K
    x_row = x + m[:, None] * x_stride
    wait(EARLY)
    sums = tl.zeros((16, BN), tl.float32)
    for at in tl.range(part * each, tl.minimum(part * each + each, K), BK, num_stages=STAGES):
        k = at + lane
        if EVEN_K:
            w = tl.load(w_row + k[None, :], eviction_policy="evict_first")
            rows = tl.load(x_row + k[None, :], mask=(m < M)[:, None], other=0.0)
        else:
            w = tl.load(
                w_row + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first"
            )
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
                sums += tl.load(
                    parts + other * 16 * N + place, mask=there, other=0.0, cache_modifier=".cg"
                )
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
    """The division of a product into programs."""

    outputs: int  # outputs of a program
    inputs: int  # inputs (elements along K) that an iteration loads
    split: int  # programs among which K is divided
    warps: int
    stages: int


def cut_of(n: int, k: int) -> Cut:
    """Returns the division into programs that was fastest on an H200 for the products of a 1B and
    an 8B model. n, k: numbers of outputs and inputs."""
    if n >= 8192:
        return Cut(32, 128, 1, 4, 5) if 24576 <= n < 65536 else Cut(64, 128, 1, 4, 4)
    if n >= 3072 and k <= 4096:
        return Cut(32, 256, 1, 4, 4)
    return Cut(64, 128, 4, 4, 4)


@dataclass(slots=True, frozen=True)
class SmallWeight:
    """A weight and scratch memory for its products. Because of the scratch memory, products with
    the same weight must not overlap in time. N: outputs, K: inputs."""

    weight: Tensor  # [N, K] contiguous
    cut: Cut
    parts: Tensor | None  # [split, 16, N] float32: partial sums of programs that share K
    # [programs along N] int32: counters of finished programs, zeros between calls
    arrived: Tensor | None
    # [N] float32: scales of an e4m3 weight, which only one-row products support
    scale: Tensor | None = None


def prepare_small(weight: Tensor, cut: Cut | None = None) -> SmallWeight:
    """Prepares weight [N, K]; copies it only if it isn't contiguous. cut: None: see `cut_of`."""
    n, k = weight.shape
    cut = cut or cut_of(n, k)
    if cut.split == 1:
        return SmallWeight(weight.contiguous(), cut, None, None)
    parts = torch.empty((cut.split, MOST_ROWS, n), dtype=torch.float32, device=weight.device)
    arrived = torch.zeros(cdiv(n, cut.outputs), dtype=torch.int32, device=weight.device)
    return SmallWeight(weight.contiguous(), cut, parts, arrived)


def linear_small(x: Tensor, small: SmallWeight, bias: Tensor | None = None) -> Tensor:
    """Returns x @ weight.T + bias, [M, N]. x: [M, K], 1 <= M <= 16, of the weight's dtype. bias:
    [N]."""
    (m, k), n, cut = x.shape, small.weight.shape[0], small.cut
    assert 1 <= m <= MOST_ROWS and x.stride(1) == 1 and k == small.weight.shape[1]
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    each = cdiv(cdiv(k, cut.split), cut.inputs) * cut.inputs
    split = cdiv(k, each)
    early = 2 * has_pdl(x.device)
    _linear_small[(cdiv(n, cut.outputs), split)](
        x,
        small.weight,
        x if bias is None else bias,
        out,
        x if split == 1 else small.parts,
        x if split == 1 else small.arrived,
        m,
        n,
        k,
        x.stride(0),
        each,
        BN=cut.outputs,
        BK=cut.inputs,
        SPLIT=split,
        HAS_BIAS=bias is not None,
        EVEN_K=k % cut.inputs == 0,
        EVEN_N=n % cut.outputs == 0,
        STAGES=cut.stages,
        EARLY=early,
        num_warps=cut.warps,
        launch_pdl=bool(early),
    )
    return out
