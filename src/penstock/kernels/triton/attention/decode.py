"""Attention of decode queries. A query attends to its row's own blocks. If its row is in a prefix
group, it continues from the result of the group's shared prefix.

A program handles a range of a row's tokens and one KV head, and reads their K and V once. With few
rows, several programs share a row's tokens, and a second launch joins their results. Row ids,
lengths and blocks are read on the device. So launches depend only on the number of queries and on
`max_tokens`, and a kernel is compiled once for a model, not once for each step size.

S: decode queries, H: query heads, Hkv: KV heads, D: numbers of a head, W: blocks of a row's block
table."""

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
    scales_of,
    span,
    turned,
    walk_row,
    with_eight,
)
from penstock.kernels.triton.attention.prefix import MOST_PARTS, PART_TILE, PART_TOKENS, PrefixState
from penstock.kernels.triton.attention.row_parts import (
    FEW_PROGRAMS,
    MOST_SPLITS,
    extent,
    join_parts,
    splits_of,
)
from penstock.kernels.triton.grid import cdiv, next_power_of_2, precision_of, processors_of
from penstock.kernels.triton.pdl import has_pdl, wait


@triton.jit(
    do_not_specialize=[
        "capacity",
        "window",
        "splits",
        "split_tokens",
        "prefix_splits",
        "stride_blocks",
    ],
    do_not_specialize_on_alignment=["rows", "blocks", "position", "skip"],
)
def _own(
    q,  # [S, H, D]
    keys,  # [blocks, Hkv, 16, D], strided
    values,  # like keys
    scales,  # [2, Hkv] float32, for parts in eight bits
    sinks,  # [H] float32
    out,  # [S, H, D]
    answer,  # [S, H, prefix_splits, D] float32: results of parts of the prefix, without V's scale
    lse,  # [S, H, prefix_splits] float32: log-sum-exps of these parts
    part,  # [S, H, splits, D] float32: results of each program, if several share a row
    part_lse,  # [S, H, splits] float32
    blocks,  # [rows, W]
    rows,  # [S]
    position,  # [S]
    skip,  # [S]
    capacity,
    window,
    scale,
    cap,
    splits,
    split_tokens,
    prefix_splits,
    stride_q,
    stride_out,
    stride_block,
    stride_blocks,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    RATIO_PAD: tl.constexpr,
    SKIPS: tl.constexpr,
    PARTS: tl.constexpr,  # the most parts of a prefix
    PART_TOKENS: tl.constexpr,
    PART_TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPLIT: tl.constexpr,
    TOKENS: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    EIGHT: tl.constexpr,  # see flash_loop.at_head
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Kernel of `attend_rows`. A program computes one query and KV head over a part of the row's
    own tokens. SKIPS: some queries continue from a prefix, whose results are `answer` and `lse`.
    SPLIT: programs share rows, and write to `part` and `part_lse` instead of `out`."""
    wait(EARLY)
    RATIO: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    item = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    row = tl.load(rows + item).to(tl.int64)
    first, end = extent(position, skip, item, capacity, window, SKIPS, WINDOWED)
    begin = first // 16 * 16
    last = end
    split = 0
    alone = True
    if SPLIT:
        split = tl.program_id(1)
        part_tokens = span(end - begin, splits, split_tokens, TOKENS)
        alone = part_tokens >= end - begin
        begin += split * part_tokens
        last = tl.minimum(begin + part_tokens, end)
    if (begin < end) | (split == 0):
        lane = tl.arange(0, WIDTH_PAD)
        inside = lane < WIDTH
        query = tl.arange(0, RATIO_PAD)
        query_head = head * RATIO + query
        mask = (query < RATIO)[:, None] & inside[None, :]
        cell = query_head[:, None] * WIDTH + lane[None, :]
        queries = tl.load(q + item * stride_q + cell, mask=mask, other=0.0)
        has_sink = (query < RATIO) & (split == 0)
        state_max, state_sum, mixed = begun(
            sinks, query_head, has_sink, RATIO_PAD, WIDTH_PAD, SINKS
        )
        if SKIPS and (first > 0) & (split == 0):
            place = (item * HEADS + query_head) * prefix_splits
            used = 1
            if PARTS > 1:
                used = tl.cdiv(first, span(first, prefix_splits, PART_TOKENS, PART_TILE))
            for at in tl.static_range(
                PARTS
            ):  # unrolled, so that the results of all parts are loaded at the same time
                there = (query < RATIO) & (at < used)
                seen = tl.load(lse + place + at, mask=there, other=-1e30)
                each = tl.load(
                    answer + (place + at)[:, None] * WIDTH + lane[None, :],
                    mask=there[:, None] & inside[None, :],
                    other=0.0,
                )
                larger = tl.maximum(state_max, seen)
                share, shrink = tl.exp2(seen - larger), tl.exp2(state_max - larger)
                state_sum = state_sum * shrink + share
                mixed = mixed * shrink[:, None] + each * share[:, None]
                state_max = larger
        at_keys, at_values, stride_values = at_head(keys, values, head, stride_block, WIDTH, EIGHT)
        scale, of_values = scales_of(scale, scales, head, KV_HEADS, EIGHT)
        queries, scale = with_eight(queries, scale, EIGHT)
        table = blocks + row * stride_blocks
        state_max, state_sum, mixed = walk_row(
            turned(queries, EIGHT),
            state_max,
            state_sum,
            turned(mixed, EIGHT),
            at_keys,
            at_values,
            table,
            begin,
            last,
            first,
            scale,
            cap,
            stride_block,
            stride_values,
            CAPPED,
            WINDOWED,
            TOKENS,
            WIDTH,
            WIDTH_PAD,
            EIGHT,
            PRECISION,
        )
        mixed = turned(mixed, EIGHT) / state_sum[:, None]
        if EIGHT > 0:
            mixed *= of_values
        if alone:
            tl.store(out + item * stride_out + cell, mixed.to(out.dtype.element_ty), mask=mask)
        elif SPLIT:
            place = (item * HEADS + query_head) * splits + split
            tl.store(part + place[:, None] * WIDTH + lane[None, :], mixed, mask=mask)
            tl.store(part_lse + place, state_max + tl.log2(state_sum), mask=query < RATIO)


def attend_rows(
    q: Tensor,
    kv: LayerKv,
    rows: Tensor,
    block_table: Tensor,
    position: Tensor,
    skip: Tensor | None,
    prefix: PrefixState | None,
    scale: float,
    window: int | None,
    max_tokens: int,
    out: Tensor,
    few_programs: int = FEW_PROGRAMS,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> None:
    """Computes attention of q [S, H, D] over a layer's KV into out [S, H, D]. Query i is of row
    rows[i] of the block table.

    rows: [S]. block_table: [rows, W] int32. position: [S]; a query sees position + 1 tokens, at
    most W * 16. skip: [S] int32: tokens of the query's prefix, whose result is in `prefix` (from
    `prefix.attend_prefixes`); None: no query has a prefix. max_tokens: the most tokens of a query's
    own part, or an upper bound. It determines how many programs share a row, not which tokens are
    seen. few_programs: with few rows, they are shared among about so many programs. sinks: see
    `ops.Attention`. softcap: see AttentionKind."""
    count, heads, width = q.shape
    kv_heads = kv.kv_heads
    if window is not None:
        max_tokens = min(max_tokens, window + 15)
    splits, split_tokens = splits_of(count * kv_heads, max_tokens, few_programs)
    tokens, warps, stages = _shape(count * kv_heads, width, kv.eight, processors_of(q.device))
    part, part_lse = out, out
    if splits > 1:
        part = torch.empty((count, heads, splits, width), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((count, heads, splits), dtype=torch.float32, device=q.device)
    answer, lse, prefix_splits = (
        (out, out, 1) if prefix is None else (prefix.answer, prefix.lse, prefix.splits)
    )
    skips = skip is not None and prefix is not None
    step = (position, skip if skips else rows)
    sizes = (block_table.shape[1] * 16, window or 0)
    pad, early = max(16, next_power_of_2(width)), has_pdl(q.device)
    _own[(count * kv_heads, splits)](
        q,
        kv.keys,
        kv.values,
        lse if kv.scales is None else kv.scales,
        lse if sinks is None else sinks,
        out,
        answer,
        lse,
        part,
        part_lse,
        block_table,
        rows,
        *step,
        *sizes,
        scale * LOG2_E,
        (softcap or 1.0) * LOG2_E,
        splits,
        split_tokens,
        prefix_splits,
        q.stride(0),
        out.stride(0),
        kv.keys.stride(0),
        block_table.stride(0),
        heads,
        kv_heads,
        width,
        pad,
        least_queries(heads // kv_heads, kv),
        skips,
        1 if prefix_splits == 1 else MOST_PARTS,
        PART_TOKENS,
        PART_TILE,
        window is not None,
        splits > 1,
        tokens,
        sinks is not None,
        softcap is not None,
        kv.eight,
        precision_of(q.dtype, width),
        early,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=bool(early),
    )
    if splits > 1:
        join_parts[(count * heads,)](
            out,
            part,
            part_lse,
            *step,
            *sizes,
            splits,
            split_tokens,
            out.stride(0),
            heads,
            width,
            pad,
            skips,
            window is not None,
            tokens,
            MOST_SPLITS,
            16,
            EARLY=0,
            num_warps=2,
        )


def least_queries(ratio: int, kv: LayerKv) -> int:
    """Returns the number of queries to which the query heads of a KV head are padded. It is at
    least 16 if they are rows of a tensor core's product, and at least 8 if they are columns (KV in
    eight bits). ratio: query heads per KV head."""
    return max(8 if kv.eight else 16, next_power_of_2(ratio))


def _shape(count: int, width: int, eight: int, processors: int) -> tuple[int, int, int]:
    """Returns the tokens of a tile, the warps and the pipeline stages of a program. count: number
    of programs. width: numbers of a head. eight: parts in eight bits (KvForm.eight). processors:
    multiprocessors of the GPU. With many rows tiles are small, so that many programs run at once.

    At width 256 a multiprocessor of an H200 runs 3 programs with tiles of 64 tokens, or 4 with 32.
    The size is taken that leaves fewer programs for the last round. Measured TB/s with 4 KV heads
    and a window of 1,024, for tiles of 64 and of 32 tokens (a plain read of memory has 4.56): 100
    rows 2.95 and 3.95; 160 rows 3.98 and 3.41; 220 rows 3.73 and 4.17; 283 rows 4.29 and 3.77; 400
    rows 4.08 and 3.97; 560 rows 4.42 and 4.20; 717 rows 4.24 to 4.34 for both. On average, 2 warps,
    3 stages, 16 tokens, and 2 or 4 programs a row are not better."""
    if width > 256:  # Gemma 4: a tile that fits in shared memory; its speed is not measured yet
        return 32, 4, 2
    if width > 128:
        if eight:
            return 32, 2, 2
        large = count > 4 * processors and 3 * cdiv(count, 3 * processors) <= 4 * cdiv(
            count, 4 * processors
        )
        return 64 if large else 32, 4, 2
    return (32, 1, 2) if count >= 1024 else (64, 4, 2)
