"""Attention of decode rows: one query a row, over the row's own blocks, carried on from its group's prefix.

A program takes a stretch of a row's tokens x one KV head and streams their K and V once. Where there are few rows, a
row's tokens are split over programs and joined by a second launch. Everything about a row (which it is, its length, its
blocks) is read on the device, so the launches depend on the number of rows and on `max_tokens` alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _extent(length, skip, row, item, added, capacity, window, SKIPS: tl.constexpr, WINDOWED: tl.constexpr):
    """First and one past the last token that a row's own part sees, and where its first tile begins."""
    end = tl.minimum(tl.load(length + row) + added, capacity)
    first = 0
    if SKIPS:
        first = tl.load(skip + item)
    if WINDOWED:
        first = tl.maximum(end - window, 0)
    return first, end, first // 16 * 16


@triton.jit
def _span(tokens, SPLITS: tl.constexpr, SPLIT_TOKENS: tl.constexpr, TOKENS: tl.constexpr):
    """Tokens of a split: whole tiles."""
    splits = tl.minimum(tl.cdiv(tokens, SPLIT_TOKENS), SPLITS)
    return tl.cdiv(tl.cdiv(tokens, splits), TOKENS) * TOKENS


@triton.jit
def _own(
    q,  # [S, H, D]
    kv,  # [blocks, Hkv, 2, 16, D]
    out,  # [S, H, D]
    answer,  # [S, H, D]: over the prefix alone
    lse,  # [S, H] float32
    part,  # [S, H, SPLITS, D] float32
    part_lse,  # [S, H, SPLITS] float32
    rows,  # [S]
    blocks,  # [rows, W]
    length,  # [rows]
    skip,  # [S]
    added,
    capacity,
    window,
    scale,
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
    WINDOWED: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    RATIO: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    item = tl.program_id(0) // KV_HEADS
    split = tl.program_id(1)
    row = tl.load(rows + item).to(tl.int64)
    first, end, begin = _extent(length, skip, row, item, added, capacity, window, SKIPS, WINDOWED)
    last = end
    if SPLITS > 1:
        span = _span(end - begin, SPLITS, SPLIT_TOKENS, TOKENS)
        begin += split * span
        last = tl.minimum(begin + span, end)
    if begin < end:
        lane = tl.arange(0, WIDTH_PAD)
        inside = lane < WIDTH
        query = tl.arange(0, RATIO_PAD)
        query_head = head * RATIO + query
        mask = (query < RATIO)[:, None] & inside[None, :]
        cell = query_head[:, None] * WIDTH + lane[None, :]
        queries = tl.load(q + item.to(tl.int64) * stride_q + cell, mask=mask, other=0.0)
        state_max = tl.full([RATIO_PAD], -1e30, tl.float32)
        state_sum = tl.zeros([RATIO_PAD], tl.float32)
        mixed = tl.zeros([RATIO_PAD, WIDTH_PAD], tl.float32)
        if SKIPS:
            if (first > 0) & (split == 0):
                held = (query < RATIO) & (first > 0)
                state_max = tl.load(lse + item * HEADS + query_head, mask=held, other=0.0)
                state_sum += 1.0
                mixed = tl.load(answer + item.to(tl.int64) * (HEADS * WIDTH) + cell, mask=mask, other=0.0).to(
                    tl.float32
                )
        here = kv + head * (32 * WIDTH)
        table = blocks + row * stride_blocks
        token = tl.arange(0, TOKENS)
        for at in range(begin, last, TOKENS):
            where = at + token
            stored = where < last
            block = tl.load(table + where // 16, mask=stored, other=0)
            from_ = here + block.to(tl.int64) * stride_block + where % 16 * WIDTH
            if WINDOWED:
                stored &= where >= first
            held = stored[:, None] & inside[None, :]
            keys = tl.load(from_[:, None] + lane[None, :], mask=held, other=0.0)
            values = tl.load(from_[:, None] + lane[None, :] + 16 * WIDTH, mask=held, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
            scores = tl.where(stored[None, :], scores, -1e30)
            larger = tl.maximum(state_max, tl.max(scores, 1))
            weights = tl.exp2(scores - larger[:, None])
            shrink = tl.exp2(state_max - larger)
            state_sum = state_sum * shrink + tl.sum(weights, 1)
            mixed = tl.dot(weights.to(values.dtype), values, mixed * shrink[:, None], input_precision=PRECISION)
            state_max = larger
        mixed = mixed / state_sum[:, None]
        if SPLITS == 1:
            tl.store(out + item.to(tl.int64) * stride_out + cell, mixed.to(out.dtype.element_ty), mask=mask)
        else:
            place = (item * HEADS + query_head) * SPLITS + split
            tl.store(part + place[:, None] * WIDTH + lane[None, :], mixed, mask=mask)
            tl.store(part_lse + place, state_max + tl.log2(state_sum), mask=query < RATIO)


@triton.jit
def _join(
    out,
    part,
    part_lse,
    rows,
    length,
    skip,
    added,
    capacity,
    window,
    stride_out,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    SKIPS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    item = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    row = tl.load(rows + item)
    _, end, begin = _extent(length, skip, row, item, added, capacity, window, SKIPS, WINDOWED)
    splits = tl.cdiv(end - begin, _span(end - begin, SPLITS, SPLIT_TOKENS, TOKENS))
    split = tl.arange(0, SPLITS)
    lane = tl.arange(0, WIDTH_PAD)
    place = (item * HEADS + head) * SPLITS + split
    used = split < splits
    lse = tl.load(part_lse + place, mask=used, other=-1e30)
    share = tl.where(used, tl.exp2(lse - tl.max(lse, 0)), 0.0)
    mask = used[:, None] & (lane < WIDTH)[None, :]
    mixed = tl.load(part + place[:, None] * WIDTH + lane[None, :], mask=mask, other=0.0)
    mixed = tl.sum(mixed * share[:, None], 0) / tl.sum(share, 0)
    tl.store(
        out + item.to(tl.int64) * stride_out + head * WIDTH + lane, mixed.to(out.dtype.element_ty), mask=lane < WIDTH
    )


def attend_rows(
    q: Tensor,
    kv: Tensor,
    rows: Tensor,
    block_table: Tensor,
    length: Tensor,
    added: int,
    skip: Tensor | None,
    prefix: tuple[Tensor, Tensor] | None,
    scale: float,
    window: int | None,
    max_tokens: int,
    out: Tensor,
) -> None:
    """q [S, H, D] over kv [blocks, Hkv, 2, 16, D] into out [S, H, D]: item i is row rows[i] of the tables.

    rows [S], block_table [rows, W] int32, length [rows] int32: a row sees length + `added` tokens, at most W * 16, less
    the first skip[i] (skip [S] int32) where `prefix` (answer [S, H, D], lse [S, H] float32: `prefix.attend_prefixes`)
    stands for those. max_tokens: no row's own part is longer; it sets how many programs share a row, not what is seen.
    """
    count, heads, width = q.shape
    kv_heads = kv.shape[1]
    splits, split_tokens = _splits(count * kv_heads, max_tokens)
    tokens, warps, stages = _shape(count * kv_heads * splits, width)
    pad = triton.next_power_of_2(width)
    part, part_lse = out, out
    if splits > 1:
        part = torch.empty((count, heads, splits, width), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((count, heads, splits), dtype=torch.float32, device=q.device)
    answer, lse = prefix if prefix is not None else (out, out)
    skips = skip is not None and prefix is not None
    where = (rows, block_table, length, skip if skips else rows)
    capacity = block_table.shape[1] * 16
    _own[(count * kv_heads, splits)](
        q, kv, out, answer, lse, part, part_lse, *where, added, capacity, window or 0, scale * 1.4426950408889634,
        q.stride(0), out.stride(0), kv.stride(0), block_table.stride(0), heads, kv_heads, width, pad,
        max(16, triton.next_power_of_2(heads // kv_heads)), skips, window is not None, splits, split_tokens, tokens,
        "ieee" if q.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        _join[(count * heads,)](
            out, part, part_lse, rows, length, skip if skips else rows, added, capacity, window or 0, out.stride(0),
            heads, width, pad, skips, window is not None, splits, split_tokens, tokens, num_warps=4,
        )  # fmt: skip


def _shape(count: int, width: int) -> tuple[int, int, int]:
    """Tokens of a tile, warps, stages. Many programs: small ones, so that enough of them are there at once."""
    if width > 128:
        return 32, 2, 2
    return (32, 1, 2) if count >= 1024 else (64, 4, 2)


def _splits(count: int, max_tokens: int) -> tuple[int, int]:
    """Programs that share a row, a power of two, and the fewest tokens of one, where `count` programs take a row each.

    Few rows are cut until they fill the chip; more rows only so far that none of them is walked alone for long.
    """
    fill = min(64, _power(1024 // count), _power(max_tokens // 64))
    even = min(64, _power(16384 // count), _power(max_tokens // 2048))
    return (fill, 64) if fill >= even else (even, 512)


def _power(number: int) -> int:
    """The largest power of two that is not above it; 1 for 0."""
    return 1 << max(number, 1).bit_length() - 1
