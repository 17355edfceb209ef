"""Attention over shared prefixes. The queries of a prefix group are multiplied by the KV of the
group's prefix, which is read once for all of them.

A program handles a tile of rows of one group and the query heads of one KV head. It loops over the
prefix's blocks and writes the output over the prefix alone, with its log-sum-exp. `decode`
continues from there. Rows without a group are not written. The idea is Hydragen's
(arXiv:2402.05099); here one launch handles all groups, and the groups are data on the device.

S: decode queries, G: groups, H: query heads, Hkv: KV heads, D: numbers of a head, W: blocks of a
group's block table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.triton.attention.flash_loop import (
    LOG2_E,
    at_head,
    nothing_seen,
    owner,
    queries_of,
    scales_of,
    span,
    walk,
)
from penstock.kernels.triton.grid import LEAST_SHARED, next_power_of_2, precision_of, shared_of

MOST_PARTS = 8  # the most parts of a prefix, which different programs handle
PART_TOKENS = 128  # the least tokens of a part
PART_TILE = 64  # the tokens of a part are a multiple of this
# number of programs that keeps a GPU busy, although many of them find nothing to do
FILLED = 2048
EACH = 1024  # groups among which a program searches for its own at once
# bytes of shared memory for a tile of 128 queries of 128 numbers and 64 tokens, with a margin
WIDE_TILE = 106_496
MANY_ROWS = 2048  # least rows of a step for which tiles have twice as many queries


@dataclass(slots=True)
class PrefixState:
    """Buffers for the results of shared prefixes. A prefix is divided into parts (splits); for each
    query and part there is the output over the part, and its log-sum-exp in base 2. S: decode
    queries, H: query heads, D: numbers of a head."""

    answer: Tensor  # [S, H, splits, D] float32
    lse: Tensor  # [S, H, splits] float32
    splits: int  # the most parts of a prefix

    @classmethod
    def of(
        cls,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        kv_heads: int,
        groups: int,
    ) -> PrefixState:
        """Allocates buffers for queries of `shape` [S, H, D] and `dtype` over the prefixes of
        `groups` groups."""
        rows, heads, width = shape
        splits = _splits(_tiles(rows, heads // kv_heads, groups, width, dtype) * kv_heads)
        return cls(
            torch.empty((rows, heads, splits, width), dtype=torch.float32, device=device),
            torch.empty((rows, heads, splits), dtype=torch.float32, device=device),
            splits,
        )


@triton.jit(
    do_not_specialize=["groups", "splits", "stride_blocks"],
    do_not_specialize_on_alignment=["start", "blocks", "length"],
)
def _prefix(
    q,  # [S, H, D]
    keys,  # [blocks, Hkv, 16, D], strided
    values,  # like keys
    scales,  # [2, Hkv] float32, for parts in eight bits
    answer,  # [S, H, splits, D] float32, without V's scale
    lse,  # [S, H, splits] float32, base 2
    start,  # [G + 1]: group g is rows start[g] : start[g + 1]
    blocks,  # [G, W]: block table of each prefix
    length,  # [G]: tokens of each prefix
    groups,
    splits,
    scale,
    cap,
    stride_q,
    stride_block,
    stride_blocks,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    QUERIES: tl.constexpr,  # query rows of a tile
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    PART_TOKENS: tl.constexpr,
    PART_TILE: tl.constexpr,
    EACH: tl.constexpr,
    CAPPED: tl.constexpr,
    EIGHT: tl.constexpr,  # see flash_loop.at_head
    PRECISION: tl.constexpr,
):
    RATIO: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = QUERIES // RATIO
    head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    group, row = owner(start, groups, tile, ROWS, EACH)
    row_end = tl.load(start + group + 1)
    begin = 0
    end = tl.load(length + group)
    split = 0
    if SPLIT:
        split = tl.program_id(1)
        part = span(end, splits, PART_TOKENS, PART_TILE)
        begin = split * part
        end = tl.minimum(begin + part, end)
    if row < row_end and begin < end:
        lane = tl.arange(0, WIDTH_PAD)
        member, query_head, valid, mask, queries = queries_of(
            q, row, row_end, head, stride_q, RATIO, QUERIES, WIDTH, WIDTH_PAD
        )
        state_max, state_sum, mixed = nothing_seen(QUERIES, WIDTH_PAD)
        at_keys, at_values, stride_values = at_head(keys, values, head, stride_block, WIDTH, EIGHT)
        scale, _ = scales_of(scale, scales, head, KV_HEADS, EIGHT)
        table = blocks + group.to(tl.int64) * stride_blocks
        last = tl.full([QUERIES], 2**30, tl.int32)
        whole = begin + (end - begin) // TOKENS * TOKENS
        state_max, state_sum, mixed = walk(
            queries,
            state_max,
            state_sum,
            mixed,
            at_keys,
            at_values,
            table,
            begin,
            whole,
            last,
            0,
            scale,
            cap,
            stride_block,
            stride_values,
            CAPPED,
            False,
            False,
            TOKENS,
            WIDTH,
            WIDTH_PAD,
            EIGHT,
            PRECISION,
        )
        state_max, state_sum, mixed = walk(
            queries,
            state_max,
            state_sum,
            mixed,
            at_keys,
            at_values,
            table,
            whole,
            end,
            last,
            0,
            scale,
            cap,
            stride_block,
            stride_values,
            CAPPED,
            True,
            False,
            TOKENS,
            WIDTH,
            WIDTH_PAD,
            EIGHT,
            PRECISION,
        )
        place = (member.to(tl.int64) * HEADS + query_head) * splits + split
        tl.store(
            answer + place[:, None] * WIDTH + lane[None, :], mixed / state_sum[:, None], mask=mask
        )
        tl.store(lse + place, state_max + tl.log2(state_sum), mask=valid)


def attend_prefixes(
    q: Tensor,
    kv: LayerKv,
    start: Tensor,
    blocks: Tensor,
    length: Tensor,
    scale: float,
    state: PrefixState,
    softcap: float | None = None,
) -> None:
    """Computes attention of q [S, H, D] over the groups' prefixes in a layer's KV, into `state`.

    start: [G + 1], blocks: [G, W], length: [G]; int32. Rows start[g] : start[g + 1] see the first
    length[g] tokens of blocks[g]; length is a multiple of 16. The launch depends only on S and G,
    so unused groups may have no rows or length 0."""
    rows, heads, width = q.shape
    kv_heads, groups = kv.kv_heads, start.shape[0] - 1
    ratio = heads // kv_heads
    queries, tokens, warps, stages = _shape(ratio, width, q.dtype, shared_of(q.device), rows)
    tiles = _tiles(rows, ratio, groups, width, q.dtype)
    _prefix[(tiles * kv_heads, state.splits)](
        q,
        kv.keys,
        kv.values,
        state.lse if kv.scales is None else kv.scales,
        state.answer,
        state.lse,
        start,
        blocks,
        length,
        groups,
        state.splits,
        scale * LOG2_E,
        (softcap or 1.0) * LOG2_E,
        q.stride(0),
        kv.keys.stride(0),
        blocks.stride(0),
        heads,
        kv_heads,
        width,
        max(16, next_power_of_2(width)),
        queries,
        tokens,
        state.splits > 1,
        PART_TOKENS,
        PART_TILE,
        EACH,
        softcap is not None,
        kv.eight,
        precision_of(q.dtype, width),
        num_warps=warps,
        num_stages=stages,
    )


def tile_members(ratio: int, width: int, dtype: torch.dtype, rows: int = 1) -> int:
    """Returns the rows of a tile. ratio: query heads per KV head. rows: of the step."""
    return _shape(ratio, width, dtype, rows=rows)[0] // ratio


def _tiles(rows: int, ratio: int, groups: int, width: int, dtype: torch.dtype) -> int:
    """Returns how many tiles `rows` rows in `groups` groups can need at most."""
    return rows // tile_members(ratio, width, dtype, rows) + groups


def _splits(programs: int) -> int:
    """Returns the number of parts into which prefixes are divided, a power of two. It is larger if
    there are few programs. programs: their number if prefixes are not divided."""
    return 1 << max(1, min(MOST_PARTS, FILLED // programs)).bit_length() - 1


def _shape(
    ratio: int, width: int, dtype: torch.dtype, shared: int = LEAST_SHARED, rows: int = 1
) -> tuple[int, int, int, int]:
    """Returns the queries and tokens of a tile, the warps and the pipeline stages; the fastest of
    gpu_timing/prefix.py on an H200. shared: bytes of shared memory of a program. The number of
    queries doesn't depend on it. Of the four results, only the tokens of a tile affect the bits of
    a row's output."""
    if dtype == torch.float32:
        return max(16, next_power_of_2(ratio)), 32, 4, 1
    tall = 64 < width <= 128 and rows >= MANY_ROWS
    if width > 256:  # Gemma 4: fits, not measured yet
        return max(64, next_power_of_2(ratio)), 32, 8, 2
    tokens = 32 if width > 128 or (width > 64 and shared < WIDE_TILE) else 64
    return max(128 if tall else 64, next_power_of_2(ratio)), tokens, 4, 2
