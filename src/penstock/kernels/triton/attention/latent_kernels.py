"""Kernels of latent attention in the absorbed form: for shared prefixes of groups, for decode
queries' own tokens, and for chunks. `latent.py` launches them. A tile has HELD of the HEADS heads
of one or several tokens. S: decode queries, H: heads, RANK and TURNING: numbers of a latent and of
its rotated key."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.attention.flash_loop import nothing_seen, owner, span
from penstock.kernels.triton.attention.latent_walk import (
    _fetch_tile,
    _queries,
    _walk,
    _with_eight,
    _write,
)
from penstock.kernels.triton.attention.row_parts import extent
from penstock.kernels.triton.pdl import release, wait


@triton.jit(
    do_not_specialize=["groups", "splits", "stride_blocks"],
    do_not_specialize_on_alignment=["start", "blocks", "length"],
)
def _prefix(
    q,
    rotated,
    vectors,
    beside,
    of_eight,
    answer,
    lse,
    start,
    blocks,
    length,
    groups,
    splits,
    scale,
    stride_rotated,
    stride_head,
    stride_block,
    stride_beside,
    stride_blocks,
    EIGHT: tl.constexpr,
    HEADS: tl.constexpr,
    HELD: tl.constexpr,
    QUERIES: tl.constexpr,
    RANK: tl.constexpr,
    TURNING: tl.constexpr,
    RANK_PAD: tl.constexpr,
    TURNING_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_TOKENS: tl.constexpr,
    PART_TILE: tl.constexpr,
    EACH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes attention of a tile of a group's queries over a part of the group's prefix. Writes
    the output over that part to answer [S, H, splits, RANK], without the scale of eight bits, and
    its log-sum-exp to lse [S, H, splits]. vectors, beside: pointers to latents and rotated keys in
    the cache (LatentKv). of_eight: pointer to the scale of eight bits, if EIGHT. PARTS: tiles into
    which a token's heads are divided."""
    part = tl.program_id(0) % PARTS
    group, row = owner(start, groups, tl.program_id(0) // PARTS, QUERIES // HELD, EACH)
    row_end, whole = tl.load(start + group + 1), tl.load(length + group)
    split = tl.program_id(1)
    stretch = span(whole, splits, PART_TOKENS, PART_TILE)
    begin = split * stretch
    end = tl.minimum(begin + stretch, whole)
    if row < row_end and begin < end:
        member, head, valid, front, back, turned = _queries(
            q,
            rotated,
            row,
            row_end,
            part,
            stride_rotated,
            stride_head,
            HEADS,
            HELD,
            QUERIES,
            RANK,
            TURNING,
            RANK_PAD,
            TURNING_PAD,
        )
        front, back, turned, scale, _ = _with_eight(front, back, turned, scale, of_eight, EIGHT)
        state_max, state_sum, low = nothing_seen(QUERIES, RANK_PAD // 2)
        high = low
        last = tl.full([QUERIES], 2**30, tl.int32)
        table = blocks + group.to(tl.int64) * stride_blocks
        state_max, state_sum, low, high = _walk(
            front,
            back,
            turned,
            state_max,
            state_sum,
            low,
            high,
            vectors,
            beside,
            table,
            begin,
            end,
            last,
            scale,
            stride_block,
            stride_beside,
            EIGHT,
            TOKENS,
            RANK,
            TURNING,
            RANK_PAD,
            TURNING_PAD,
            PRECISION,
        )
        place = (member.to(tl.int64) * HEADS + head) * splits + split
        _write(answer + place * RANK, low, high, 1.0 / state_sum, valid, RANK, RANK_PAD)
        tl.store(lse + place, state_max + tl.log2(state_sum), mask=valid)


@triton.jit(
    do_not_specialize=["capacity", "splits", "split_tokens", "prefix_splits", "stride_blocks"],
    do_not_specialize_on_alignment=["rows", "blocks", "position", "skip"],
)
def _own(
    q,
    rotated,
    vectors,
    beside,
    of_eight,
    out,
    answer,
    lse,
    part,
    part_lse,
    blocks,
    rows,
    position,
    skip,
    capacity,
    scale,
    splits,
    split_tokens,
    prefix_splits,
    stride_rotated,
    stride_head,
    stride_block,
    stride_beside,
    stride_blocks,
    EIGHT: tl.constexpr,
    HEADS: tl.constexpr,
    HELD: tl.constexpr,
    QUERIES: tl.constexpr,
    RANK: tl.constexpr,
    TURNING: tl.constexpr,
    RANK_PAD: tl.constexpr,
    TURNING_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    SKIPS: tl.constexpr,
    CONTINUES: tl.constexpr,
    PREFIX_PARTS: tl.constexpr,
    PART_TOKENS: tl.constexpr,
    PART_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Computes attention of a decode query over a part of its own tokens, which come after its
    group's prefix if SKIPS. CONTINUES: the first program of a query continues from the result of
    the prefix. Without it, but with SKIPS, the log-sum-exp is written to lse [S, H]; then nothing
    is split. SPLIT: 0: nothing is split; 1: programs that share a row write parts, a program that
    is alone writes to out; 2: it writes a part too. EARLY: see pdl.py; the previous kernel must
    release this one after its own wait only, as this one reads everything but q before."""
    heads = tl.program_id(0) % PARTS
    item = (tl.program_id(0) // PARTS).to(tl.int64)
    row = tl.load(rows + item).to(tl.int64)
    first, end = extent(position, skip, item, capacity, 0, SKIPS, False)
    begin, last, split, alone = first, end, 0, True
    if SPLIT:
        split = tl.program_id(1)
        stretch = span(end - begin, splits, split_tokens, TOKENS)
        alone = (SPLIT == 1) & (stretch >= end - begin)
        begin += split * stretch
        last = tl.minimum(begin + stretch, end)
    table = blocks + row * stride_blocks
    if EARLY and SPLIT:
        _fetch_tile(vectors, table, begin, last, stride_block, EIGHT, TOKENS, RANK, TURNING)
    wait(EARLY)
    release(EARLY)
    if (begin < end) | (split == 0):
        _, head, valid, front, back, turned = _queries(
            q,
            rotated,
            item.to(tl.int32),
            item.to(tl.int32) + 1,
            heads,
            stride_rotated,
            stride_head,
            HEADS,
            HELD,
            QUERIES,
            RANK,
            TURNING,
            RANK_PAD,
            TURNING_PAD,
        )
        front, back, turned, scale, of_answer = _with_eight(
            front, back, turned, scale, of_eight, EIGHT
        )
        state_max, state_sum, low = nothing_seen(QUERIES, RANK_PAD // 2)
        high = low
        if CONTINUES and (first > 0) & (split == 0):
            place = (item * HEADS + head) * prefix_splits
            used, lane = 1, tl.arange(0, RANK_PAD // 2)[None, :]
            beyond = RANK_PAD // 2 + lane
            if PREFIX_PARTS > 1:
                used = tl.cdiv(first, span(first, prefix_splits, PART_TOKENS, PART_TILE))
            for at in tl.static_range(PREFIX_PARTS):
                here = valid & (at < used)
                seen = tl.load(lse + place + at, mask=here, other=-1e30)
                there, cell = here[:, None], answer + (place + at)[:, None] * RANK
                one = tl.load(cell + lane, mask=there & (lane < RANK), other=0.0)
                two = tl.load(cell + beyond, mask=there & (beyond < RANK), other=0.0)
                larger = tl.maximum(state_max, seen)
                share, shrink = tl.exp2(seen - larger), tl.exp2(state_max - larger)
                state_sum = state_sum * shrink + tl.where(here, share, 0.0)
                low = low * shrink[:, None] + one * share[:, None]
                high = high * shrink[:, None] + two * share[:, None]
                state_max = larger
        everything = tl.full([QUERIES], 2**30, tl.int32)
        state_max, state_sum, low, high = _walk(
            front,
            back,
            turned,
            state_max,
            state_sum,
            low,
            high,
            vectors,
            beside,
            table,
            begin,
            last,
            everything,
            scale,
            stride_block,
            stride_beside,
            EIGHT,
            TOKENS,
            RANK,
            TURNING,
            RANK_PAD,
            TURNING_PAD,
            PRECISION,
        )
        share = of_answer / state_sum
        if alone:
            _write(out + (item * HEADS + head) * RANK, low, high, share, valid, RANK, RANK_PAD)
            if SKIPS and not CONTINUES:
                tl.store(lse + item * HEADS + head, state_max + tl.log2(state_sum), mask=valid)
        elif SPLIT:
            place = (item * HEADS + head) * splits + split
            _write(part + place * RANK, low, high, share, valid, RANK, RANK_PAD)
            tl.store(part_lse + place, state_max + tl.log2(state_sum), mask=valid)


@triton.jit(
    do_not_specialize=["chunks", "tiles", "stride_blocks"],
    do_not_specialize_on_alignment=["start", "context", "blocks"],
)
def _prefill(
    q,
    rotated,
    vectors,
    beside,
    of_eight,
    out,
    start,
    context,
    blocks,
    chunks,
    tiles,
    scale,
    stride_rotated,
    stride_head,
    stride_block,
    stride_beside,
    stride_blocks,
    EIGHT: tl.constexpr,
    HEADS: tl.constexpr,
    HELD: tl.constexpr,
    QUERIES: tl.constexpr,
    RANK: tl.constexpr,
    TURNING: tl.constexpr,
    RANK_PAD: tl.constexpr,
    TURNING_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes attention of a tile of a chunk's tokens. Each token sees its prompt up to itself."""
    ROWS: tl.constexpr = QUERIES // HELD
    part = tl.program_id(0) % PARTS
    chunk, row = owner(start, chunks, tiles - 1 - tl.program_id(0) // PARTS, ROWS)
    chunk_start, chunk_end = tl.load(start + chunk), tl.load(start + chunk + 1)
    ahead = tl.load(context + chunk)
    if row < chunk_end:
        member, head, valid, front, back, turned = _queries(
            q,
            rotated,
            row,
            chunk_end,
            part,
            stride_rotated,
            stride_head,
            HEADS,
            HELD,
            QUERIES,
            RANK,
            TURNING,
            RANK_PAD,
            TURNING_PAD,
        )
        lowest = ahead + row - chunk_start
        end = tl.minimum(lowest + ROWS, ahead + chunk_end - chunk_start)
        position = tl.minimum(lowest + member - row, end - 1)
        front, back, turned, scale, of_answer = _with_eight(
            front, back, turned, scale, of_eight, EIGHT
        )
        state_max, state_sum, low = nothing_seen(QUERIES, RANK_PAD // 2)
        high = low
        table = blocks + chunk.to(tl.int64) * stride_blocks
        state_max, state_sum, low, high = _walk(
            front,
            back,
            turned,
            state_max,
            state_sum,
            low,
            high,
            vectors,
            beside,
            table,
            0,
            end,
            position,
            scale,
            stride_block,
            stride_beside,
            EIGHT,
            TOKENS,
            RANK,
            TURNING,
            RANK_PAD,
            TURNING_PAD,
            PRECISION,
        )
        to = out + (member.to(tl.int64) * HEADS + head) * RANK
        _write(to, low, high, of_answer / state_sum, valid, RANK, RANK_PAD)
