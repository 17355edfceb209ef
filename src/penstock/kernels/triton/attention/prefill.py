"""Attention of chunks of prompts. Each token of a chunk sees its prompt's tokens up to itself; the
chunk's own K and V are already in the cache.

A program handles a tile of a chunk's tokens and the query heads of one KV head (FlashAttention-2's
loop, arXiv:2307.08691, over a paged cache). The launch depends only on the numbers of tokens and
chunks. T: tokens of all chunks, H: query heads, Hkv: KV heads, D: numbers of a head, W: blocks of a
block table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.triton.attention.flash_loop import (
    LOG2_E,
    at_head,
    begun,
    owner,
    queries_of,
    scales_of,
    walk,
)
from penstock.kernels.triton.grid import next_power_of_2, precision_of, shared_of

WIDE_TILE = 196_608  # bytes of shared memory that the largest tile needs


@triton.jit(
    do_not_specialize=["chunks", "tiles", "window", "stride_blocks"],
    do_not_specialize_on_alignment=["start", "context", "blocks"],
)
def _prefill(
    q,  # [T, H, D]
    keys,  # [blocks, Hkv, 16, D], strided
    values,  # like keys
    scales,  # [2, Hkv] float32, for parts in eight bits
    sinks,  # [H] float32
    out,  # [T, H, D]
    start,  # [chunks + 1]: chunk c is tokens start[c] : start[c + 1]
    context,  # [chunks]: position of each chunk's first token
    blocks,  # [chunks, W]: block table of each chunk's prompt
    chunks,
    tiles,
    window,
    scale,
    cap,
    stride_q,
    stride_out,
    stride_block,
    stride_blocks,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    WINDOWED: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    EIGHT: tl.constexpr,  # see flash_loop.at_head
    PRECISION: tl.constexpr,
):
    RATIO: tl.constexpr = HEADS // KV_HEADS
    ROWS: tl.constexpr = QUERIES // RATIO
    head = tl.program_id(0) % KV_HEADS
    # the last tiles of a chunk see most tokens and take longest, so they go first
    tile = tiles - 1 - tl.program_id(0) // KV_HEADS
    chunk, row = owner(start, chunks, tile, ROWS)
    chunk_start = tl.load(start + chunk)
    chunk_end = tl.load(start + chunk + 1)
    ahead = tl.load(context + chunk)
    if row < chunk_end:
        lane = tl.arange(0, WIDTH_PAD)
        member, query_head, valid, mask, queries = queries_of(
            q, row, chunk_end, head, stride_q, RATIO, QUERIES, WIDTH, WIDTH_PAD
        )
        lowest = ahead + row - chunk_start
        end = tl.minimum(lowest + ROWS, ahead + chunk_end - chunk_start)
        position = tl.minimum(lowest + member - row, end - 1)
        state_max, state_sum, mixed = begun(sinks, query_head, valid, QUERIES, WIDTH_PAD, SINKS)
        at_keys, at_values, stride_values = at_head(keys, values, head, stride_block, WIDTH, EIGHT)
        scale, of_values = scales_of(scale, scales, head, KV_HEADS, EIGHT)
        table = blocks + chunk.to(tl.int64) * stride_blocks
        # With a window, some queries of the tile see the tokens [edge, clear), all see [clear,
        # whole), and some see [whole, end).
        clear = 0
        whole = (lowest + 1) // TOKENS * TOKENS
        if WINDOWED:
            edge = tl.maximum(lowest - window + 1, 0) // TOKENS * TOKENS
            clear = tl.maximum(lowest + ROWS - window + TOKENS - 1, 0) // TOKENS * TOKENS
            clear = tl.minimum(clear, whole)
            state_max, state_sum, mixed = walk(
                queries,
                state_max,
                state_sum,
                mixed,
                at_keys,
                at_values,
                table,
                edge,
                clear,
                position,
                window,
                scale,
                cap,
                stride_block,
                stride_values,
                CAPPED,
                True,
                True,
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
            clear,
            whole,
            position,
            window,
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
            position,
            window,
            scale,
            cap,
            stride_block,
            stride_values,
            CAPPED,
            True,
            WINDOWED,
            TOKENS,
            WIDTH,
            WIDTH_PAD,
            EIGHT,
            PRECISION,
        )
        cell = (
            member.to(tl.int64)[:, None] * stride_out + query_head[:, None] * WIDTH + lane[None, :]
        )
        mixed = mixed / state_sum[:, None]
        if EIGHT > 0:
            mixed *= of_values
        tl.store(out + cell, mixed.to(out.dtype.element_ty), mask=mask)


def attend_chunks(
    q: Tensor,
    kv: LayerKv,
    start: Tensor,
    context: Tensor,
    block_table: Tensor,
    scale: float,
    window: int | None,
    out: Tensor,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> None:
    """Computes attention of q [T, H, D] over a layer's KV into out [T, H, D]. Chunk c is tokens
    start[c] : start[c + 1].

    start: [chunks + 1], context: [chunks] (position of a chunk's first token), block_table:
    [chunks, W]; int32. A token sees its prompt's tokens up to itself, with a window the last
    `window` of them. A chunk may be empty. sinks: see `ops.Attention`. softcap: see AttentionKind.
    """
    count, heads, width = q.shape
    kv_heads, chunks = kv.kv_heads, context.shape[0]
    ratio = heads // kv_heads
    queries, tokens, warps, stages = _shape(ratio, width, q.dtype, shared_of(q.device), kv.eight)
    tiles = count // (queries // ratio) + chunks
    _prefill[(tiles * kv_heads,)](
        q,
        kv.keys,
        kv.values,
        q if kv.scales is None else kv.scales,
        q if sinks is None else sinks,
        out,
        start,
        context,
        block_table,
        chunks,
        tiles,
        window or 0,
        scale * LOG2_E,
        (softcap or 1.0) * LOG2_E,
        q.stride(0),
        out.stride(0),
        kv.keys.stride(0),
        block_table.stride(0),
        heads,
        kv_heads,
        width,
        max(16, next_power_of_2(width)),
        window is not None,
        queries,
        tokens,
        sinks is not None,
        softcap is not None,
        kv.eight,
        precision_of(q.dtype, width),
        num_warps=warps,
        num_stages=stages,
    )


def _shape(
    ratio: int, width: int, dtype: torch.dtype, shared: int, eight: int
) -> tuple[int, int, int, int]:
    """Returns the queries and tokens of a tile, the warps and the pipeline stages. They were the
    fastest of ten choices on an H200 for 16 chunks of 1,024 tokens: 278 TFLOP/s with heads of 256
    numbers (width 256), and 290 at widths 128 and 64. On GPUs with less shared memory, width 256
    has tiles of 64 queries and 32 tokens (244 TFLOP/s on the H200). ratio: query heads per KV head.
    shared: bytes of shared memory. eight: KvForm.eight. K and V in eight bits are widened for each
    tile of queries. So tiles then have 128 queries, and a token is read half as often as with 64:
    261 instead of 192 TFLOP/s at width 128 (323 instead of 224 for 4 chunks of 4,096 tokens), and
    225 instead of 193 at width 64."""
    if dtype == torch.float32:
        return max(16, next_power_of_2(ratio)), 32, 4, 1
    # a tile has at least all query heads (of the KV head) of one token
    least = next_power_of_2(ratio)
    if width > 256:  # Gemma 4: fits, not measured yet
        return max(64, least), 32, 8, 2
    if width > 128:
        return (max(128, least), 64, 8, 2) if shared >= WIDE_TILE else (max(64, least), 32, 4, 2)
    return max(128 if eight == 2 else 64, least), 64, 4, 2
