"""Attention of one row, in two launches: its tokens in parts, then the parts joined.

`_parts` asks for what earlier steps stored (the row's length, its blocks, K and V) before the kernel ahead has ended;
only the query and the new token's K and V wait for it. Joining by each program of the product behind it reads all parts
as often as there are programs: 17 us a layer of an 8B, where a launch of its own and the product take 12. It knows a
row and its blocks; no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.inputs import StepInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.triton.decode import least_queries
from penstock.kernels.triton.flash_loop import (
    LOG2_E,
    at_head,
    attend_tile,
    eight_cells,
    load_blocks,
    nothing_seen,
    plain_cells,
    scales_of,
    turned,
    walk_row,
    with_eight,
)
from penstock.kernels.triton.pdl import has_pdl, release, wait

PARTS = 16  # programs that share a row and KV head, at most
TOKENS = 64  # of a tile; a part has at least one
EARLY = 2  # pdl.py; an 8B's step 3.002 ms, where the second is 1: 3.035


@triton.jit
def _extent(rows, length, capacity, window, WINDOWED: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr):
    """The row, its first visible token, one past its last, where its first part begins, and the tokens of a part."""
    row = tl.load(rows).to(tl.int64)
    end = tl.minimum(tl.load(length + row) + 1, capacity)
    first = end * 0
    if WINDOWED:
        first = tl.maximum(end - window, 0)
    begin = first // 16 * 16
    used = tl.minimum(tl.cdiv(end - begin, TOKENS), PARTS)
    return row, first, end, begin, tl.cdiv(tl.cdiv(end - begin, used), TOKENS) * TOKENS


@triton.jit(
    do_not_specialize=["capacity", "window", "stride_blocks"],
    do_not_specialize_on_alignment=["rows", "blocks", "length"],
)
def _parts(
    q, keys, values, scales, part, part_lse, blocks, rows, length, capacity, window, scale, stride_block, stride_blocks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
    RATIO_PAD: tl.constexpr, WINDOWED: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
    EIGHT: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    release(EARLY)
    RATIO: tl.constexpr = HEADS // KV_HEADS
    head, place = tl.program_id(0), tl.program_id(1)
    row, first, end, begin, span = _extent(rows, length, capacity, window, WINDOWED, TOKENS, PARTS)
    begin += place * span
    last = tl.minimum(begin + span, end)
    lane = tl.arange(0, WIDTH_PAD)
    inside = lane < WIDTH
    token = tl.arange(0, TOKENS)
    at_keys, at_values, stride_values = at_head(keys, values, head, stride_block, WIDTH, EIGHT)
    scale, of_values = scales_of(scale, scales, head, KV_HEADS, EIGHT)
    table = blocks + row * stride_blocks
    where = begin + token
    stored = where < last
    if EIGHT > 0:
        block = load_blocks(table, begin, last, token)
        cell, beside = eight_cells(at_keys, at_values, block, token, stride_block, stride_values, lane, WIDTH)
        there = begin + token // 16 * 16 < last
        old_v = tl.load(beside, mask=there[None, :] & inside[:, None], other=0.0)
    else:
        block = tl.load(table + where // 16, mask=stored, other=0)
        cell, beside = plain_cells(at_keys, block, where, stride_block, lane, WIDTH)
    if WINDOWED:
        stored &= where >= first
    old = (stored & (where < end - 1))[:, None] & inside[None, :]
    new = (stored & (where == end - 1))[:, None] & inside[None, :]
    old_k = tl.load(cell, mask=old, other=0.0)
    if EIGHT == 0:
        old_v = tl.load(beside, mask=old, other=0.0)
    wait(EARLY)
    if begin < end:
        query = tl.arange(0, RATIO_PAD)
        query_head = head * RATIO + query
        mask = (query < RATIO)[:, None] & inside[None, :]
        queries = tl.load(q + query_head[:, None] * WIDTH + lane[None, :], mask=mask, other=0.0)
        queries, scale = with_eight(queries, scale, EIGHT)
        queries = turned(queries, EIGHT)
        k = tl.where(new, tl.load(cell, mask=new, other=0.0), old_k)
        if EIGHT > 0:
            # Its bytes lie among older tokens' that were read before it came: not from this multiprocessor's cache.
            latest = (where == end - 1)[None, :] & inside[:, None]
            v = tl.where(latest, tl.load(beside, mask=latest, other=0.0, cache_modifier=".cg"), old_v)
        else:
            v = tl.where(new, tl.load(beside, mask=new, other=0.0), old_v)
        state_max, state_sum, mixed = nothing_seen(RATIO_PAD, WIDTH_PAD)
        state_max, state_sum, mixed = attend_tile(
            queries, state_max, state_sum, turned(mixed, EIGHT), k, v, stored, scale, EIGHT, PRECISION
        )
        state_max, state_sum, mixed = walk_row(
            queries, state_max, state_sum, mixed, at_keys, at_values, table, begin + TOKENS, last, first, scale,
            stride_block, stride_values, WINDOWED, TOKENS, WIDTH, WIDTH_PAD, EIGHT, PRECISION,
        )  # fmt: skip
        mixed = turned(mixed, EIGHT) / state_sum[:, None]
        if EIGHT > 0:
            mixed *= of_values
        to = query_head * PARTS + place
        tl.store(part + to[:, None] * WIDTH + lane[None, :], mixed, mask=mask)
        tl.store(part_lse + to, state_max + tl.log2(state_sum), mask=query < RATIO)


@triton.jit(do_not_specialize=["capacity", "window"], do_not_specialize_on_alignment=["rows", "length"])
def _joined(
    part, part_lse, rows, length, capacity, window, out,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, WINDOWED: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    release(EARLY)
    head = tl.program_id(0)
    lane = tl.arange(0, WIDTH_PAD)
    inside = lane < WIDTH
    place = tl.arange(0, PARTS)
    _, _, end, begin, span = _extent(rows, length, capacity, window, WINDOWED, TOKENS, PARTS)
    there = place < tl.cdiv(end - begin, span)
    wait(EARLY)
    seen = tl.load(part_lse + head * PARTS + place, mask=there, other=-1e30)
    each = tl.load(
        part + (head * PARTS + place)[:, None] * WIDTH + lane[None, :], mask=there[:, None] & inside[None, :], other=0.0
    )
    share = tl.exp2(seen - tl.max(seen, 0))
    mixed = tl.sum(each * share[:, None], 0) / tl.sum(share, 0)
    tl.store(out + head * WIDTH + lane, mixed.to(out.dtype.element_ty), mask=inside)


def attend_one(q: Tensor, kv: LayerKv, inputs: StepInputs, scale: float, window: int | None) -> Tensor:
    """q [1, H, D] over a layer's KV -> [1, H, D]. inputs.decode: the row, which stands alone; it sees length + 1 tokens
    (its new one is stored), with a window the last `window` of them."""
    decode = inputs.decode
    assert decode is not None and decode.groups is None and q.stride()[1:] == (q.shape[2], 1)
    _, heads, width = q.shape
    kv_heads, device = kv.kv_heads, q.device
    part = torch.empty((heads, PARTS, width), dtype=torch.float32, device=device)
    lse = torch.empty((heads, PARTS), dtype=torch.float32, device=device)
    out = torch.empty((1, heads, width), dtype=q.dtype, device=device)
    can = has_pdl(device)
    capacity, windowed = decode.table.shape[1] * 16, window is not None
    tokens = TOKENS if width <= 128 else TOKENS // 2
    wide = max(16, triton.next_power_of_2(width))
    _parts[(kv_heads, PARTS)](
        q, kv.keys, kv.values, lse if kv.scales is None else kv.scales, part, lse, decode.table, decode.rows,
        decode.length, capacity, window or 0, scale * LOG2_E, kv.keys.stride(0), decode.table.stride(0), HEADS=heads,
        KV_HEADS=kv_heads, WIDTH=width, WIDTH_PAD=wide, RATIO_PAD=least_queries(heads // kv_heads, kv),
        WINDOWED=windowed, TOKENS=tokens, PARTS=PARTS, EIGHT=kv.eight,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", EARLY=EARLY * can, num_warps=4, num_stages=2,
        launch_pdl=bool(can),
    )  # fmt: skip
    _joined[(heads,)](
        part, lse, decode.rows, decode.length, capacity, window or 0, out, WIDTH=width, WIDTH_PAD=wide,
        WINDOWED=windowed, TOKENS=tokens, PARTS=PARTS, EARLY=EARLY * can, num_warps=4, launch_pdl=bool(can),
    )  # fmt: skip
    return out
