"""Product of one row with a weight, without tensor cores.

A program computes one or two outputs over all K inputs, so no partial sums have to be joined. It
loads its first weights before the previous kernel has ended, since weights are constant. N:
outputs, K: inputs. Knows a matrix and a row; no layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.pdl import has_pdl, release_late, wait


@triton.jit
def _linear_one(
    x,
    weight,
    scale,
    bias,
    out,
    N,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Kernel of `linear_one` and `gate_one`. A program computes BN outputs, BK inputs at a time.
    GATED: the weight has 2 N rows, and output n is silu(product with row n) * product with row N +
    n. SCALED: the weight is e4m3 with scale [N]. EARLY: see pdl.py."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    lane = tl.arange(0, BK)
    w_row = weight + tl.minimum(n, N - 1)[:, None].to(tl.int64) * K
    w = tl.load(w_row + lane[None, :], mask=(lane < K)[None, :], other=0.0)
    if GATED:
        up_row = w_row + N.to(tl.int64) * K
        ups = tl.load(up_row + lane[None, :], mask=(lane < K)[None, :], other=0.0)
    wait(EARLY)
    # Only for e4m3 weights: a decode step of a model with 16-bit weights takes 0.780 ms with this
    # line and 0.773 without.
    if SCALED:
        release_late(EARLY)
    row = tl.load(x + lane, mask=lane < K, other=0.0).to(tl.float32)
    sums = tl.sum(w.to(tl.float32) * row[None, :], axis=1)
    if GATED:
        up = tl.sum(ups.to(tl.float32) * row[None, :], axis=1)
    for at in tl.static_range(BK, K, BK):
        k = at + lane
        more = tl.load(w_row + k[None, :], mask=(k < K)[None, :], other=0.0).to(tl.float32)
        row = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        sums += tl.sum(more * row[None, :], axis=1)
        if GATED:
            ups = tl.load(up_row + k[None, :], mask=(k < K)[None, :], other=0.0).to(tl.float32)
            up += tl.sum(ups * row[None, :], axis=1)
    if SCALED:
        sums *= tl.load(scale + n, mask=n < N, other=0.0)
    if GATED:
        up *= tl.load(scale + N + n, mask=n < N, other=0.0)
        gate = sums.to(out.dtype.element_ty).to(tl.float32)
        sums = gate / (1.0 + tl.exp(-gate)) * up.to(out.dtype.element_ty).to(tl.float32)
    if HAS_BIAS:
        sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, sums.to(out.dtype.element_ty), mask=n < N)


@dataclass(slots=True, frozen=True)
class Strip:
    """The division of a one-row product into programs."""

    outputs: int  # outputs of a program
    inputs: int  # inputs (elements along K) that an iteration loads
    warps: int


def strip_of(k: int, size: int = 2) -> Strip:
    """Returns the division into programs that was fastest on an H200. k: inputs. size: bytes of an
    element of the weight. With 2 bytes, the products of a 1B and an 8B model read weights at 58 to
    108 % of copy speed (cuBLAS: 32 to 103 %); with 1 byte, those of an 8B model at 61 to 93 %."""
    if size == 1:
        return Strip(2, min(2048, max(16, next_power_of_2(k))), 2)
    if k <= 1024:
        return Strip(2, max(16, next_power_of_2(k)), 4)
    if k <= 4096:
        return Strip(1, next_power_of_2(k), 4)
    if k <= 8192:
        return Strip(1, next_power_of_2(k), 16)
    return Strip(2, 4096, 8) if k % 4096 == 0 else Strip(2, 2048, 4)


def linear_one(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    strip: Strip | None = None,
    *,
    scale: Tensor | None = None,
) -> Tensor:
    """Returns x @ weight.T + bias, [1, N]. x: [1, K]. weight: [N, K] contiguous, of x's dtype, or
    e4m3 with a scale [N]. bias: [N]. strip: None: see `strip_of`."""
    n, k = weight.shape
    strip = strip or strip_of(k, weight.element_size())
    assert x.shape == (1, k) and x.stride(1) == 1 and weight.is_contiguous()
    out = torch.empty((1, n), dtype=x.dtype, device=x.device)
    early = has_pdl(x.device)
    _linear_one[(cdiv(n, strip.outputs),)](
        x,
        weight,
        x if scale is None else scale,
        x if bias is None else bias,
        out,
        n,
        K=k,
        BN=strip.outputs,
        BK=strip.inputs,
        GATED=False,
        SCALED=scale is not None,
        HAS_BIAS=bias is not None,
        EARLY=early,
        num_warps=strip.warps,
        launch_pdl=bool(early),
    )
    return out


def gate_one(x: Tensor, weight: Tensor, scale: Tensor, strip: Strip | None = None) -> Tensor:
    """Returns silu(x @ gate.T) * (x @ up.T), [1, F]. x: [1, K]. weight: [2F, K] e4m3 (the gate's
    rows, then up's). scale: [2F]."""
    n, k = weight.shape
    strip = strip or Strip(2, min(4096, max(16, next_power_of_2(k))), 4)
    out = torch.empty((1, n // 2), dtype=x.dtype, device=x.device)
    early = has_pdl(x.device)
    _linear_one[(cdiv(n // 2, strip.outputs),)](
        x,
        weight,
        scale,
        x,
        out,
        n // 2,
        K=k,
        BN=strip.outputs,
        BK=strip.inputs,
        GATED=True,
        SCALED=True,
        HAS_BIAS=False,
        EARLY=early,
        num_warps=strip.warps,
        launch_pdl=bool(early),
    )
    return out
