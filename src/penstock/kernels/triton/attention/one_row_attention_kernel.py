"""Kernel of a single row's attention, which may also rotate and store the new token. Several
programs share the row's tokens: each computes a part of them, and the last one joins the parts'
results. D: numbers of a head."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.attention.flash_loop import (
    at_head,
    attend_tile,
    begun,
    eight_cells,
    load_blocks,
    plain_cells,
    scales_of,
    turned,
    walk_row,
    with_eight,
)
from penstock.kernels.triton.attention.rotary_and_store import store_eight_v, store_kv, to_eight
from penstock.kernels.triton.fixed_row import store_fixed
from penstock.kernels.triton.pdl import release, wait

JOINED = 4096  # numbers that a program joins at once: parts x outputs of a KV head
EARLY = 2  # see pdl.py


@triton.jit
def _extent(
    rows,
    length,
    capacity,
    window,
    WINDOWED: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Returns the row's id, its first visible token, one past its last token, the start of its
    first part, and the tokens of a part. capacity: the most tokens of a row. PARTS: the most parts.
    """
    row = tl.load(rows).to(tl.int64)
    end = tl.minimum(tl.load(length + row) + 1, capacity)
    first = end * 0
    if WINDOWED:
        first = tl.maximum(end - window, 0)
    begin = first // 16 * 16
    used = tl.minimum(tl.cdiv(end - begin, TOKENS), PARTS)
    return row, first, end, begin, tl.cdiv(tl.cdiv(end - begin, used), TOKENS) * TOKENS


@triton.jit
def _rotated(source, cos, sin, lane, inside, WIDTH: tl.constexpr):
    """Loads heads at pointers `source` [..., 1] and rotates them as `rotary_and_store.py` does;
    keeps their dtype. lane: indices of a head's numbers. cos, sin: for each of them."""
    HALF: tl.constexpr = WIDTH // 2
    own = tl.load(source + lane, mask=inside, other=0.0).to(tl.float32)
    beside = tl.load(source + (lane + HALF) % WIDTH, mask=inside, other=0.0).to(tl.float32)
    return (own * cos + tl.where(lane < HALF, -beside, beside) * sin).to(source.dtype.element_ty)


@triton.jit
def _new_token(
    qkv,
    cos,
    sin,
    slot,
    keys,
    values,
    scales,
    stride_block,
    head,
    lane,
    inside,
    stores,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    EIGHT: tl.constexpr,
):
    """Returns the new token's K and V of a KV head, [WIDTH_PAD] each, as they would be read from
    the cache. stores: True if this program stores them."""
    k = _rotated(qkv + (HEADS + head) * WIDTH, cos, sin, lane, inside, WIDTH)
    v = tl.load(qkv + (HEADS + KV_HEADS + head) * WIDTH + lane, mask=inside, other=0.0)
    there = inside & stores
    store_kv(
        keys, scales, slot, stride_block, head, lane < 0, lane, k, there, KV_HEADS, WIDTH, 16, EIGHT
    )
    if EIGHT > 0:
        store_eight_v(
            keys, values, scales, slot, stride_block, head, lane, v, there, KV_HEADS, WIDTH, 16
        )
        v = to_eight(v, tl.load(scales + KV_HEADS + head))
    else:
        store_kv(
            keys,
            scales,
            slot,
            stride_block,
            head,
            lane >= 0,
            lane,
            v,
            there,
            KV_HEADS,
            WIDTH,
            16,
            EIGHT,
        )
    if EIGHT == 2:
        k = to_eight(k, tl.load(scales + head))
    return k, v


@triton.jit
def _join(
    part,
    part_lse,
    out,
    out_sums,
    out_scale,
    head,
    used,
    total_width,
    kind: tl.constexpr,
    RATIO: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Joins the results of `used` parts and writes the outputs of a KV head's queries. A column is
    one number of one query's output; AT_ONCE parts of all columns are loaded at once. Joining one
    query after the other took 2.9 us more for each layer of a 1B model, and 2.1 us more for each
    layer of an 8B model. total_width: numbers of all heads together."""
    column = tl.arange(0, COLUMNS)
    query, lane = column // WIDTH_PAD, column % WIDTH_PAD
    inside = (query < RATIO) & (lane < WIDTH)
    row = (head * RATIO + query) * PARTS
    place = tl.arange(0, AT_ONCE)
    largest = tl.full([COLUMNS], -1e30, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    mixed = tl.zeros([COLUMNS], tl.float32)
    for begin in range(0, used, AT_ONCE):
        at = row[None, :] + begin + place[:, None]
        there = (begin + place < used)[:, None] & inside[None, :]
        seen = tl.load(part_lse + at, mask=there, other=-1e30, cache_modifier=".cg")
        each = tl.load(
            part + at * WIDTH + lane[None, :], mask=there, other=0.0, cache_modifier=".cg"
        )
        larger = tl.maximum(largest, tl.max(seen, 0))
        shrink, share = tl.exp2(largest - larger), tl.exp2(seen - larger[None, :])
        total = total * shrink + tl.sum(share, 0)
        mixed = mixed * shrink + tl.sum(each * share, 0)
        largest = larger
    answers = (mixed / total).to(kind)
    if FIXED:  # writes fixed point; columns of padding are zeros, as store_fixed needs
        first = tl.arange(0, COLUMNS // 16) * 16
        query, lane = first // WIDTH_PAD, first % WIDTH_PAD
        block = ((head * RATIO + query) * WIDTH + lane) // 16
        inside = (query < RATIO) & (lane < WIDTH)
        store_fixed(
            answers.reshape(COLUMNS // 16, 16), out, out_scale, out_sums, block, inside, total_width
        )
    else:
        tl.store(out + (head * RATIO + query) * WIDTH + lane, answers, mask=inside)


@triton.jit(
    do_not_specialize=["capacity", "window", "stride_blocks"],
    do_not_specialize_on_alignment=["rows", "blocks", "length"],
)
def _attend_one(
    q,
    cos_sin,
    positions,
    slots,
    keys,
    values,
    scales,
    sinks,
    part,
    part_lse,
    arrived,
    out,
    out_sums,
    out_scale,
    blocks,
    rows,
    length,
    capacity,
    window,
    scale,
    cap,
    stride_block,
    stride_blocks,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    RATIO_PAD: tl.constexpr,
    RAW: tl.constexpr,
    WINDOWED: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    EIGHT: tl.constexpr,
    FIXED: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program per KV head and part of the row's tokens. RAW: True: q is the output of the qkv
    product, in which nothing is rotated, and the new token's K and V have to be stored."""
    RATIO: tl.constexpr = HEADS // KV_HEADS
    head, place = tl.program_id(0), tl.program_id(1)
    row, first, end, begin, span = _extent(rows, length, capacity, window, WINDOWED, TOKENS, PARTS)
    used = tl.cdiv(end - begin, span)
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
        cell, beside = eight_cells(
            at_keys, at_values, block, token, stride_block, stride_values, lane, WIDTH
        )
        there = begin + token // 16 * 16 < last
        old_v = tl.load(beside, mask=there[None, :] & inside[:, None], other=0.0)
    else:
        block = tl.load(table + where // 16, mask=stored, other=0)
        cell, beside = plain_cells(at_keys, block, where, stride_block, lane, WIDTH)
    if WINDOWED:
        stored &= where >= first
    is_new = where == end - 1
    old = (stored & (where < end - 1))[:, None] & inside[None, :]
    new = (stored & is_new)[:, None] & inside[None, :]
    latest = is_new[None, :] & inside[:, None]
    old_k = tl.load(cell, mask=old, other=0.0)
    if EIGHT == 0:
        old_v = tl.load(beside, mask=old, other=0.0)
    if RAW:
        angles = cos_sin + tl.load(positions).to(tl.int64) * WIDTH + lane % (WIDTH // 2)
        cos, sin = tl.load(angles), tl.load(angles + WIDTH // 2)
        slot = tl.load(slots).to(tl.int64)
    wait(EARLY)
    release(EARLY)
    if begin < end:
        query = tl.arange(0, RATIO_PAD)
        query_head = head * RATIO + query
        mask = (query < RATIO)[:, None] & inside[None, :]
        if RAW:
            queries = _rotated(
                q + query_head[:, None] * WIDTH,
                cos[None, :],
                sin[None, :],
                lane[None, :],
                mask,
                WIDTH,
            )
            new_k, new_v = _new_token(
                q,
                cos,
                sin,
                slot,
                keys,
                values,
                scales,
                stride_block,
                head,
                lane,
                inside,
                last == end,
                HEADS,
                KV_HEADS,
                WIDTH,
                EIGHT,
            )
            k = tl.where(new, new_k[None, :], old_k)
            if EIGHT > 0:
                v = tl.where(latest, new_v[:, None], old_v)
            else:
                v = tl.where(new, new_v[None, :], old_v)
        else:
            queries = tl.load(q + query_head[:, None] * WIDTH + lane[None, :], mask=mask, other=0.0)
            k = tl.where(new, tl.load(cell, mask=new, other=0.0), old_k)
            if EIGHT > 0:
                # The new token's K and V share cache lines with older tokens, which were read
                # before the new ones were written. So they are read past the multiprocessor's L1
                # cache.
                v = tl.where(
                    latest, tl.load(beside, mask=latest, other=0.0, cache_modifier=".cg"), old_v
                )
            else:
                v = tl.where(new, tl.load(beside, mask=new, other=0.0), old_v)
        queries, scale = with_eight(queries, scale, EIGHT)
        queries = turned(queries, EIGHT)
        has_sink = (query < RATIO) & (place == 0)
        state_max, state_sum, mixed = begun(
            sinks, query_head, has_sink, RATIO_PAD, WIDTH_PAD, SINKS
        )
        state_max, state_sum, mixed = attend_tile(
            queries,
            state_max,
            state_sum,
            turned(mixed, EIGHT),
            k,
            v,
            stored,
            scale,
            cap,
            CAPPED,
            EIGHT,
            PRECISION,
        )
        state_max, state_sum, mixed = walk_row(
            queries,
            state_max,
            state_sum,
            mixed,
            at_keys,
            at_values,
            table,
            begin + TOKENS,
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
        to = query_head * PARTS + place
        tl.store(part + to[:, None] * WIDTH + lane[None, :], mixed, mask=mask)
        tl.store(part_lse + to, state_max + tl.log2(state_sum), mask=query < RATIO)
        tl.debug_barrier()
        if tl.atomic_add(arrived + head, 1, sem="acq_rel") == used - 1:
            tl.store(arrived + head, 0)
            _join(
                part,
                part_lse,
                out,
                out_sums,
                out_scale,
                head,
                used,
                HEADS * WIDTH,
                q.dtype.element_ty,
                RATIO,
                COLUMNS,
                WIDTH,
                WIDTH_PAD,
                PARTS,
                AT_ONCE,
                FIXED,
            )
