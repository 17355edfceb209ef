"""The two products of absorbed latent attention that are by head: queries mapped to the latents'
space, and weighted sums of latents mapped to values. Many tokens take the library's batched
product, few a kernel that reads its weights early.

A program has a tile of tokens, one head, and some of the outputs. It reads its part of the head's
matrix before the previous kernel has ended. T: tokens, H: heads; rank, turning, still, value: see
LatentSizes."""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.latent import LatentSizes
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.pdl import early_of, release, wait

# The most tokens whose products are the kernels'. GLM-4.7-Flash's two take on an H200 5.4 + 9.6 us
# at 64 tokens, the library's 4.0 + 4.7; at 1,000 tokens 22 + 22, 13 + 12.
FEW_TOKENS = 32
# Inputs of an iteration: all, if they are so few; else LANES, of two iterations at once. This fits
# the shared memory of small chips in float32 too.
ALL_INPUTS, LANES = 128, 64
# Outputs of a program, for tiles of 16 tokens and of 32: few tokens take small programs, so that
# there are enough.
FEW_OUTPUTS, OUTPUTS = 64, 128


@triton.jit
def _product(
    x, w, real, there, step, K, EARLY: tl.constexpr, LANES: tl.constexpr, PRECISION: tl.constexpr
):
    """Returns the product [M, N] in float32. x: pointers to the first input of each row, [M, 1],
    with mask `real`. w: pointers to the first input of each output, [1, N], with mask `there`.
    step: between the inputs of an output. K: inputs. LANES: inputs of an iteration."""
    lane = tl.arange(0, LANES)
    first = tl.load(w + lane[:, None] * step, mask=there & (lane < K)[:, None], other=0.0)
    wait(EARLY)
    release(EARLY)
    row = tl.load(x + lane[None, :], mask=real & (lane < K)[None, :], other=0.0)
    sums = tl.dot(row, first, input_precision=PRECISION)
    for at in range(LANES, K, LANES):
        inside = at + lane < K
        row = tl.load(x + (at + lane)[None, :], mask=real & inside[None, :], other=0.0)
        more = tl.load(w + (at + lane)[:, None] * step, mask=there & inside[:, None], other=0.0)
        sums = tl.dot(row, more, sums, input_precision=PRECISION)
    return sums


@triton.jit(do_not_specialize=["tokens"])
def _absorb(
    q,
    up,
    out,
    tokens,
    token_stride,
    head_stride,
    STILL: tl.constexpr,
    RANK: tl.constexpr,
    VALUE: tl.constexpr,
    HEADS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    LANES: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Kernel of `absorbed_queries`. q: [tokens, HEADS, STILL], with strides of tokens and heads.
    up: [HEADS, STILL + VALUE, RANK]. out: [tokens, HEADS, RANK]."""
    head = tl.program_id(1)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    real = (m < tokens)[:, None]
    x = q + m[:, None].to(tl.int64) * token_stride + head * head_stride
    w = up + head.to(tl.int64) * ((STILL + VALUE) * RANK) + n[None, :]
    made = _product(x, w, real, (n < RANK)[None, :], RANK, STILL, EARLY, LANES, PRECISION)
    to = out + (m[:, None].to(tl.int64) * HEADS + head) * RANK
    tl.store(to + n[None, :], made.to(out.dtype.element_ty), mask=real & (n < RANK)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _answer(
    seen,
    up,
    out,
    tokens,
    STILL: tl.constexpr,
    RANK: tl.constexpr,
    VALUE: tl.constexpr,
    HEADS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    LANES: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Kernel of `values_of`. seen: [tokens, HEADS, RANK]. up: [HEADS, STILL + VALUE, RANK]. out:
    [tokens, HEADS, VALUE]."""
    head = tl.program_id(1)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    real, there = (m < tokens)[:, None], (n < VALUE)[None, :]
    at = m[:, None].to(tl.int64) * HEADS + head
    w = up + (head.to(tl.int64) * (STILL + VALUE) + STILL + n[None, :]) * RANK
    made = _product(seen + at * RANK, w, real, there, 1, RANK, EARLY, LANES, PRECISION)
    tl.store(out + at * VALUE + n[None, :], made.to(out.dtype.element_ty), mask=real & there)


def absorbed_queries(q: Tensor, up: Tensor, sizes: LatentSizes) -> Tensor:
    """Returns queries for latents, [T, H, rank]: the part that doesn't rotate multiplied by the
    keys' part of `up`. q: [T, H, still + turning], whose last dimension has no gaps. up: [H,
    still + value, rank]."""
    tokens, heads, _ = q.shape
    out = torch.empty((tokens, heads, sizes.rank), dtype=q.dtype, device=q.device)
    if tokens > FEW_TOKENS:
        _by_head(q[..., : sizes.still], up[:, : sizes.still], out)
    elif tokens:
        how = _how(tokens, sizes.still, q.dtype)
        grid = _grid(sizes.rank, heads, tokens, how)
        early = early_of(q.device, prod(grid))
        _absorb[grid](
            q,
            up,
            out,
            tokens,
            q.stride(0),
            q.stride(1),
            STILL=sizes.still,
            RANK=sizes.rank,
            VALUE=sizes.value,
            HEADS=heads,
            **how,
            EARLY=early,
            launch_pdl=bool(early),
        )
    return out


def values_of(seen: Tensor, up: Tensor, sizes: LatentSizes, out: Tensor) -> Tensor:
    """Writes the values [T, H, value] of weighted sums of latents [T, H, rank] to `out`, without
    gaps; returns it. up: [H, still + value, rank]."""
    tokens, heads, _ = seen.shape
    if tokens > FEW_TOKENS:
        _by_head(seen, up[:, sizes.still :].mT, out)
    elif tokens:
        how = _how(tokens, sizes.rank, seen.dtype)
        grid = _grid(sizes.value, heads, tokens, how)
        early = early_of(seen.device, prod(grid))
        _answer[grid](
            seen,
            up,
            out,
            tokens,
            STILL=sizes.still,
            RANK=sizes.rank,
            VALUE=sizes.value,
            HEADS=heads,
            **how,
            EARLY=early,
            launch_pdl=bool(early),
        )
    return out


def _by_head(x: Tensor, w: Tensor, out: Tensor) -> None:
    """Multiplies x [T, H, K] by each head's w [H, K, N]; writes out [T, H, N]. The library reads
    and writes these strides without a copy."""
    torch.bmm(x.transpose(0, 1), w, out=out.transpose(0, 1))


def _how(tokens: int, inputs: int, dtype: torch.dtype) -> dict[str, int | str]:
    """Returns the division into programs, for up to FEW_TOKENS tokens."""
    few, lanes = tokens <= 16, next_power_of_2(inputs)
    return {
        "BM": 16 if few else 32,
        "BN": FEW_OUTPUTS if few else OUTPUTS,
        "LANES": max(16, lanes) if lanes <= ALL_INPUTS else LANES,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": 4,
        "num_stages": 2,
    }


def _grid(outputs: int, heads: int, tokens: int, how: dict[str, int | str]) -> tuple[int, int, int]:
    return cdiv(outputs, int(how["BN"])), heads, cdiv(tokens, int(how["BM"]))
