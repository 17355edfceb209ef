"""The two products of absorbed latent attention that are by head: queries mapped to the latents'
space, and weighted sums of latents mapped to values. Many tokens take the library's batched
product. Few take a kernel that reads its weights early: `latent_store`'s for queries, `_answer` for
values.

A program has a tile of tokens, one head, and some of the outputs. It reads its part of the head's
matrix before the previous kernel has ended. T: tokens, H: heads; rank, turning, still, value: see
LatentSizes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.latent import LatentSizes
from penstock.kernels.triton.attention.row_parts import MOST_SPLITS, joined, parts_used
from penstock.kernels.triton.grid import cdiv, next_power_of_2
from penstock.kernels.triton.pdl import early_of, release, wait

# The most tokens whose products are the kernels'. GLM-4.7-Flash's two take on an H200 5.4 + 9.6 us
# at 64 tokens, the library's 4.0 + 4.7; at 1,000 tokens 22 + 22, 13 + 12.
FEW_TOKENS = 32
# Up to 16 tokens: a program reads all its weights before the previous kernel has ended, if there are
# at most FEW_INPUTS: at most FEW_NUMBERS numbers, of FEW_OUTPUTS outputs.
FEW_INPUTS, FEW_NUMBERS, FEW_OUTPUTS = 512, 2**14, 64
# Else, inputs of an iteration: all, if they are so few; else LANES, of two iterations at once. This
# fits the shared memory of small chips in float32 too.
ALL_INPUTS, LANES, OUTPUTS = 128, 64, 128
AT_ONCE = tl.constexpr(16)  # parts that are loaded at once to be joined


@triton.jit
def product(
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


@triton.jit(
    do_not_specialize=["tokens", "capacity", "splits", "split_tokens"],
    do_not_specialize_on_alignment=["position", "skip"],
)
def _answer(
    seen,
    lse,
    up,
    out,
    position,
    skip,
    tokens,
    capacity,
    splits,
    split_tokens,
    STILL: tl.constexpr,
    RANK: tl.constexpr,
    VALUE: tl.constexpr,
    HEADS: tl.constexpr,
    JOINS: tl.constexpr,
    SKIPS: tl.constexpr,
    TOKENS: tl.constexpr,
    MOST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    LANES: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Kernel of `values_of`. seen: [tokens, HEADS, RANK]; if JOINS, the parts of one token [HEADS,
    splits, RANK], with lse [HEADS, splits]. up: [HEADS, STILL + VALUE, RANK]. out: [tokens, HEADS,
    VALUE]. Other arguments: see Parts."""
    head = tl.program_id(1)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    real, there = (m < tokens)[:, None], (n < VALUE)[None, :]
    at = m[:, None].to(tl.int64) * HEADS + head
    w = up + (head.to(tl.int64) * (STILL + VALUE) + STILL + n[None, :]) * RANK
    if JOINS:
        lane = tl.arange(0, LANES)
        of_value = tl.load(w + lane[:, None], mask=there & (lane < RANK)[:, None], other=0.0)
        wait(EARLY)
        release(EARLY)
        used = parts_used(
            position, skip, 0, capacity, 0, splits, split_tokens, SKIPS, False, TOKENS
        )
        one = joined(seen, lse, head * splits, used, RANK, LANES, MOST, AT_ONCE)
        row = tl.where((m == 0)[:, None], one[None, :], 0.0).to(of_value.dtype)
        made = tl.dot(row, of_value, input_precision=PRECISION)
    else:
        made = product(seen + at * RANK, w, real, there, 1, RANK, EARLY, LANES, PRECISION)
    tl.store(out + at * VALUE + n[None, :], made.to(out.dtype.element_ty), mask=real & there)


def joins_parts(rank: int) -> bool:
    """Returns True if `values_of` can join parts of latents of this rank: a program of `_answer`
    has all of a joined sum."""
    return next_power_of_2(rank) <= FEW_INPUTS


@dataclass(slots=True, frozen=True)
class Parts:
    """Weighted sums of latents by the programs that share one token's row, not yet joined."""

    sums: Tensor  # [H, splits, rank] float32
    lse: Tensor  # [H, splits] float32: log-sum-exps of the parts
    position: Tensor  # [1]
    skip: Tensor | None  # [1]: tokens of the row's prefix; None: it has none
    capacity: int  # the most tokens of a row
    splits: int  # the most programs of the row
    split_tokens: int  # about the fewest tokens of a program
    tile: int  # a program's tokens are a multiple of this


def absorbed_queries(q: Tensor, up: Tensor, sizes: LatentSizes) -> Tensor:
    """Returns queries for latents, [T, H, rank]: the part that doesn't rotate multiplied by the
    keys' part of `up`. q: [T, H, still + turning], whose last dimension has no gaps. up: [H,
    still + value, rank]. For few tokens `latent_store` makes them."""
    out = torch.empty((*q.shape[:2], sizes.rank), dtype=q.dtype, device=q.device)
    _by_head(q[..., : sizes.still], up[:, : sizes.still], out)
    return out


def values_of(seen: Tensor | Parts, up: Tensor, sizes: LatentSizes, out: Tensor) -> Tensor:
    """Writes the values [T, H, value] of weighted sums of latents to `out`, without gaps; returns
    it. seen: [T, H, rank], or parts of one token's sums, which are joined. up: [H, still + value,
    rank]."""
    tokens, heads, _ = out.shape
    if isinstance(seen, Tensor) and tokens > FEW_TOKENS:
        _by_head(seen, up[:, sizes.still :].mT, out)
    elif tokens:
        how = how_of(tokens, sizes.rank, out.dtype)
        of = seen if isinstance(seen, Parts) else Parts(seen, seen, seen, None, 0, 1, 1, 1)
        assert of is not seen or joins_parts(sizes.rank)
        grid = grid_of(sizes.value, heads, tokens, how)
        early = early_of(out.device, prod(grid))
        _answer[grid](
            of.sums,
            of.lse,
            up,
            out,
            of.position,
            of.position if of.skip is None else of.skip,
            tokens,
            of.capacity,
            of.splits,
            of.split_tokens,
            STILL=sizes.still,
            RANK=sizes.rank,
            VALUE=sizes.value,
            HEADS=heads,
            JOINS=of is seen,
            SKIPS=of.skip is not None,
            TOKENS=of.tile,
            MOST=MOST_SPLITS,
            **how,
            EARLY=early,
            launch_pdl=bool(early),
        )
    return out


def _by_head(x: Tensor, w: Tensor, out: Tensor) -> None:
    """Multiplies x [T, H, K] by each head's w [H, K, N]; writes out [T, H, N]. The library reads
    and writes these strides without a copy."""
    torch.bmm(x.transpose(0, 1), w, out=out.transpose(0, 1))


def how_of(tokens: int, inputs: int, dtype: torch.dtype) -> dict[str, int | str]:
    """Returns the division into programs, for up to FEW_TOKENS tokens."""
    few, lanes = tokens <= 16, max(16, next_power_of_2(inputs))
    if few and lanes <= FEW_INPUTS:
        outputs = min(FEW_OUTPUTS, FEW_NUMBERS // lanes)
    else:
        outputs, lanes = OUTPUTS, lanes if lanes <= ALL_INPUTS else LANES
    return {
        "BM": 16 if few else 32,
        "BN": outputs,
        "LANES": lanes,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": 4,
        "num_stages": 2,
    }


def grid_of(
    outputs: int, heads: int, tokens: int, how: dict[str, int | str]
) -> tuple[int, int, int]:
    return cdiv(outputs, int(how["BN"])), heads, cdiv(tokens, int(how["BM"]))
