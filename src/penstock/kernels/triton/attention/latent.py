"""Attention over latent vectors (arXiv:2405.04434): all heads read one vector a token, as its key
whole and, the first part of it, as its value. A vector is loaded once for scores and answers.

Programs take a tile of queries, each a token x some of its heads, and walk the tokens' vectors: a
stretch of a decode row's own (`_own`), a group's prefix (`_prefix`), a chunk's (`_prefill`). How
work is shared, joined and carried on from a prefix is as `decode`, `prefix` and `prefill` have it
for keys and values by head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.inputs import AttentionKind, DecodeInputs, StepInputs
from penstock.kernels.latent import EXPAND_TOKENS, LatentSizes
from penstock.kernels.state_forms import LatentKv
from penstock.kernels.triton.attention.attention import KindPlan
from penstock.kernels.triton.attention.decode import (
    FEW_PROGRAMS,
    MOST_SPLITS,
    extent,
    join_parts,
    splits_of,
)
from penstock.kernels.triton.attention.flash_loop import LOG2_E, nothing_seen, owner, span
from penstock.kernels.triton.attention.latent_chunks import (
    LEAST,
    ChunkRoom,
    attend_expanded,
    heads_at_once,
)
from penstock.kernels.triton.attention.prefix import EACH, MOST_PARTS, PART_TILE, PART_TOKENS
from penstock.kernels.triton.grid import cdiv, next_power_of_2, shared_of

Shape = tuple[int, int, int, int]  # queries of a program at least, tokens of a tile, warps, stages


@triton.jit
def _queries(
    q,
    row,
    row_end,
    part,
    stride,
    HEADS: tl.constexpr,
    HELD: tl.constexpr,
    QUERIES: tl.constexpr,
    RANK: tl.constexpr,
    TURNING: tl.constexpr,
    RANK_PAD: tl.constexpr,
    TURNING_PAD: tl.constexpr,
):
    """A tile of QUERIES: as many rows from `row` on as it holds x HELD heads, the part-th of HEADS
    -> rows, heads, which there are, and the queries in parts: two halves [M, RANK_PAD / 2], and
    what turns [M, TURNING_PAD]."""
    at, turn, low = tl.arange(0, QUERIES), tl.arange(0, TURNING_PAD), tl.arange(0, RANK_PAD // 2)
    high = RANK_PAD // 2 + low
    member, head = row + at // HELD, part * HELD + at % HELD
    valid = (member < row_end) & (at < QUERIES // HELD * HELD) & (head < HEADS)
    cell = q + member.to(tl.int64)[:, None] * stride + head[:, None] * (RANK + TURNING)
    front = tl.load(cell + low[None, :], mask=valid[:, None] & (low < RANK)[None, :], other=0.0)
    back = tl.load(cell + high[None, :], mask=valid[:, None] & (high < RANK)[None, :], other=0.0)
    turned = tl.load(
        cell + RANK + turn[None, :], mask=valid[:, None] & (turn < TURNING)[None, :], other=0.0
    )
    return member, head, valid, front, back, turned


@triton.jit
def _with_eight(front, back, turned, scale, of_eight, EIGHT: tl.constexpr):
    """Queries as they are multiplied by what is stored, the scale of their scores, and that of
    answers. Vectors in eight bits are widened to float16, as `flash_loop.with_eight` has it:
    queries, which are 4 powers of two smaller, have the vectors' scale in them."""
    of_answer = 1.0
    if EIGHT:
        of_answer = tl.load(of_eight)
        if turned.dtype == tl.float32:
            front, back = front * of_answer, back * of_answer
        else:
            front = (front.to(tl.float32) * (of_answer * 0.0625)).to(tl.float16)
            back = (back.to(tl.float32) * (of_answer * 0.0625)).to(tl.float16)
            turned, scale = (turned * 0.0625).to(turned.dtype), scale * 16
    return front, back, turned, scale, of_answer


@triton.jit
def _walk(
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
    position,
    scale,
    stride_block,
    stride_beside,
    EIGHT: tl.constexpr,
    TOKENS: tl.constexpr,
    RANK: tl.constexpr,
    TURNING: tl.constexpr,
    RANK_PAD: tl.constexpr,
    TURNING_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`flash_loop.walk` over vectors in halves, of which fewer registers are held at once than of
    whole ones, from a block's first token on. A second walk without masks, over what every query
    sees, would take registers for both: 848 bytes of a thread's lie in memory then, of eight warps.
    """
    token, lane, turn = tl.arange(0, TOKENS), tl.arange(0, RANK_PAD // 2), tl.arange(0, TURNING_PAD)
    beyond = RANK_PAD // 2 + lane
    FROM: tl.constexpr = RANK if EIGHT else RANK + TURNING  # numbers between tokens
    BESIDE: tl.constexpr = TURNING if EIGHT else FROM
    for at in range(begin, end, TOKENS):
        where = at + token
        stored = where < end
        block = tl.load(table + where // 16, mask=stored, other=0).to(tl.int64)
        cell = vectors + block * stride_block + where % 16 * FROM
        one = tl.load(
            cell[:, None] + lane[None, :], mask=stored[:, None] & (lane < RANK)[None, :], other=0.0
        )
        two = tl.load(
            cell[:, None] + beyond[None, :],
            mask=stored[:, None] & (beyond < RANK)[None, :],
            other=0.0,
        )
        keys = beside + block * stride_beside + where % 16 * BESIDE
        key = tl.load(
            keys[:, None] + turn[None, :],
            mask=stored[:, None] & (turn < TURNING)[None, :],
            other=0.0,
        )
        if EIGHT:
            one, two = one.to(front.dtype), two.to(front.dtype)
        scores = tl.dot(turned, tl.trans(key), input_precision=PRECISION)
        scores = tl.dot(front, tl.trans(one), scores, input_precision=PRECISION)
        scores = tl.dot(back, tl.trans(two), scores, input_precision=PRECISION)
        scores = tl.where(stored[None, :] & (where[None, :] <= position[:, None]), scores, -1e30)
        larger = tl.maximum(state_max, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - larger[:, None])
        shrink = tl.exp2(state_max - larger)
        state_sum = state_sum * shrink + tl.sum(weights, 1)
        weights = weights.to(one.dtype)
        low = tl.dot(weights, one, low * shrink[:, None], input_precision=PRECISION)
        high = tl.dot(weights, two, high * shrink[:, None], input_precision=PRECISION)
        state_max = larger
    return state_max, state_sum, low, high


@triton.jit
def _write(to, low, high, share, valid, RANK: tl.constexpr, RANK_PAD: tl.constexpr):
    """Two halves of answers [M, RANK_PAD / 2], times share [M], where `to` [M] points and `valid`
    says."""
    lane, there = tl.arange(0, RANK_PAD // 2)[None, :], valid[:, None]
    beyond = RANK_PAD // 2 + lane
    dtype: tl.constexpr = to.dtype.element_ty
    tl.store(to[:, None] + lane, (low * share[:, None]).to(dtype), mask=there & (lane < RANK))
    tl.store(to[:, None] + beyond, (high * share[:, None]).to(dtype), mask=there & (beyond < RANK))


@triton.jit(
    do_not_specialize=["groups", "splits", "stride_blocks"],
    do_not_specialize_on_alignment=["start", "blocks", "length"],
)
def _prefix(
    q,
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
    stride_q,
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
    """Leaves the answer over each part of a group's prefix [S, H, splits, RANK], the scale of eight
    bits left out, and its log-sum-exp [S, H, splits]. vectors, beside: LatentKv's, of_eight its
    scale where EIGHT. PARTS: programs that take the heads of a tile."""
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
            row,
            row_end,
            part,
            stride_q,
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
    stride_q,
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
    PREFIX_PARTS: tl.constexpr,
    PART_TOKENS: tl.constexpr,
    PART_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A stretch of a decode row's own tokens, carried on from its group's prefix by the first that
    shares the row."""
    heads = tl.program_id(0) % PARTS
    item = (tl.program_id(0) // PARTS).to(tl.int64)
    row = tl.load(rows + item).to(tl.int64)
    first, end = extent(position, skip, item, capacity, 0, SKIPS, False)
    begin, last, split, alone = first, end, 0, True
    if SPLIT:
        split = tl.program_id(1)
        stretch = span(end - begin, splits, split_tokens, TOKENS)
        alone = stretch >= end - begin
        begin += split * stretch
        last = tl.minimum(begin + stretch, end)
    if (begin < end) | (split == 0):
        _, head, valid, front, back, turned = _queries(
            q,
            item.to(tl.int32),
            item.to(tl.int32) + 1,
            heads,
            stride_q,
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
        if SKIPS and (first > 0) & (split == 0):
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
        table = blocks + row * stride_blocks
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
    stride_q,
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
    """A tile of a chunk's tokens, each over its prompt up to itself."""
    ROWS: tl.constexpr = QUERIES // HELD
    part = tl.program_id(0) % PARTS
    chunk, row = owner(start, chunks, tiles - 1 - tl.program_id(0) // PARTS, ROWS)
    chunk_start, chunk_end = tl.load(start + chunk), tl.load(start + chunk + 1)
    ahead = tl.load(context + chunk)
    if row < chunk_end:
        member, head, valid, front, back, turned = _queries(
            q,
            row,
            chunk_end,
            part,
            stride_q,
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


def latent_attention(
    q: Tensor,
    up: Tensor,
    kv: LatentKv,
    inputs: StepInputs,
    kind: AttentionKind,
    plan: KindPlan,
    *,
    expand_tokens: int = EXPAND_TOKENS,
) -> Tensor:
    """q [T, H, still + turning], up [H, still + value, rank], over a layer's vectors -> [T, H,
    value]. The contract is `ops.AttentionOverLatents`; the keyword: kernels/tunables.py."""
    sizes, rows, chunks = kind.latent, inputs.rows, inputs.prefill
    assert sizes is not None, "the kind is of latent attention"
    made = chunks is not None and chunks.expands(sizes, expand_tokens)
    if not made or chunks is None or not heads_at_once(chunks, sizes, kind.heads, q.dtype):
        return _absorbed(q, up, kv, inputs, kind, plan, sizes)
    out = torch.empty((*q.shape[:2], sizes.value), dtype=q.dtype, device=q.device)
    if rows:
        out[:rows] = _absorbed(q[:rows], up, kv, inputs, kind, plan, sizes)
    if plan.room is None:
        plan.room = ChunkRoom.of(chunks, sizes, q.dtype)
    attend_expanded(q[rows:], up, kv, chunks, kind, plan.room, out[rows:])
    return out


def _absorbed(
    q: Tensor,
    up: Tensor,
    kv: LatentKv,
    inputs: StepInputs,
    kind: AttentionKind,
    plan: KindPlan,
    sizes: LatentSizes,
) -> Tensor:
    still = sizes.still
    asked = torch.bmm(q[..., :still].transpose(0, 1), up[:, :still]).transpose(0, 1)
    seen = attend_vectors(torch.cat((asked, q[..., still:]), 2), kv, inputs, kind, plan)
    return torch.bmm(seen.transpose(0, 1), up[:, still:].mT).transpose(0, 1)


def attend_vectors(
    q: Tensor, kv: LatentKv, inputs: StepInputs, kind: AttentionKind, plan: KindPlan
) -> Tensor:
    """q [T, H, rank + turning], multiplied by the keys' part of `up`, over a layer's vectors ->
    what they weigh [T, H, rank]: rows, and of chunks the tokens that `q` has."""
    rank, rows = kv.value_width, inputs.rows
    out = torch.empty((*q.shape[:2], rank), dtype=q.dtype, device=q.device)
    if (decode := plan.decode) is not None:
        _attend_prefixes(q[:rows], kv, decode, kind, plan)
        _attend_rows(q[:rows], kv, decode, kind, plan, out[:rows])
    if inputs.prefill is not None and q.shape[0] > rows:
        chunks = inputs.prefill
        count, shape = chunks.context.shape[0], _tall_shape(q.dtype, kv, shared_of(q.device))
        held, queries = _tile(kind.heads, shape)
        tiles = (q.shape[0] - rows) // (queries // held) + count
        parts = cdiv(kind.heads, held)
        _prefill[(tiles * parts,)](
            q[rows:],
            *_stored(kv, out),
            out[rows:],
            chunks.start,
            chunks.context,
            chunks.block_table,
            count,
            tiles,
            kind.scale * LOG2_E,
            q.stride(0),
            *_strides(kv),
            chunks.block_table.stride(0),
            HEADS=kind.heads,
            HELD=held,
            QUERIES=queries,
            **_widths(kv),
            PARTS=parts,
            **_how(q, shape),
        )
    return out


def _attend_prefixes(
    q: Tensor, kv: LatentKv, decode: DecodeInputs, kind: AttentionKind, plan: KindPlan
) -> None:
    groups, state = decode.groups, plan.prefix
    if groups is None or state is None:
        return
    count, shape = groups.length.shape[0], _tall_shape(q.dtype, kv, shared_of(q.device))
    held, queries = _tile(kind.heads, shape)
    tiles, parts = q.shape[0] // (queries // held) + count, cdiv(kind.heads, held)
    _prefix[(tiles * parts, state.splits)](
        q,
        *_stored(kv, state.lse),
        state.answer,
        state.lse,
        groups.start,
        groups.blocks,
        groups.length,
        count,
        state.splits,
        kind.scale * LOG2_E,
        q.stride(0),
        *_strides(kv),
        groups.blocks.stride(0),
        HEADS=kind.heads,
        HELD=held,
        QUERIES=queries,
        **_widths(kv),
        PARTS=parts,
        PART_TOKENS=PART_TOKENS,
        PART_TILE=PART_TILE,
        EACH=EACH,
        **_how(q, shape),
    )


def _attend_rows(
    q: Tensor, kv: LatentKv, decode: DecodeInputs, kind: AttentionKind, plan: KindPlan, out: Tensor
) -> None:
    count, heads, rank, state = q.shape[0], kind.heads, kv.value_width, plan.prefix
    shape = _rows_shape(q.dtype, kv)
    held = min(shape[0], next_power_of_2(heads))
    parts = cdiv(heads, held)
    splits, split_tokens = splits_of(count * parts, decode.max_own, FEW_PROGRAMS)
    part, part_lse = out, out
    if splits > 1:
        part = torch.empty((count, heads, splits, rank), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((count, heads, splits), dtype=torch.float32, device=q.device)
    answer, lse, prefix_splits = (
        (out, out, 1) if state is None else (state.answer, state.lse, state.splits)
    )
    skips = state is not None
    step = (decode.position, decode.skip if skips else decode.rows)
    capacity = decode.table.shape[1] * 16
    _own[(count * parts, splits)](
        q,
        *_stored(kv, out),
        out,
        answer,
        lse,
        part,
        part_lse,
        decode.table,
        decode.rows,
        *step,
        capacity,
        kind.scale * LOG2_E,
        splits,
        split_tokens,
        prefix_splits,
        q.stride(0),
        *_strides(kv),
        decode.table.stride(0),
        HEADS=heads,
        HELD=held,
        QUERIES=shape[0],
        **_widths(kv),
        PARTS=parts,
        SKIPS=skips,
        PREFIX_PARTS=1 if prefix_splits == 1 else MOST_PARTS,
        PART_TOKENS=PART_TOKENS,
        PART_TILE=PART_TILE,
        SPLIT=splits > 1,
        **_how(q, shape),
    )
    if splits > 1:
        join_parts[(count * heads,)](
            out,
            part,
            part_lse,
            *step,
            capacity,
            0,
            splits,
            split_tokens,
            out.stride(0),
            heads,
            rank,
            next_power_of_2(rank),
            skips,
            False,
            shape[1],
            MOST_SPLITS,
            8,
            num_warps=4,
        )


def _tile(heads: int, shape: Shape) -> tuple[int, int]:
    """Returns the heads of a token that a tile of a prefix or a chunk holds, and its queries."""
    tall = shape[0]
    held = heads if heads <= tall else tall // 2 if heads % tall else tall
    return held, max(tall, next_power_of_2(held))


def _rows_shape(dtype: torch.dtype, kv: LatentKv) -> Shape:
    """Returns the shape of a program of a decode row, whose queries are heads. 1,000 rows of
    Moonlight's behind 2,048 tokens on an H200: 727 us, 77 % of copy speed (8 warps and 2 stages
    955); 128 rows 115 (141)."""
    return (16, 16, 8, 1) if dtype == torch.float32 else (16, 32, 4, 3)


def _tall_shape(dtype: torch.dtype, kv: LatentKv, shared: int) -> Shape:
    """Returns that of a program of a prefix or a chunk: what its shared memory holds, of DeepSeek's
    widths. 64 queries are what Hopper's products of a warp group want, and eight bits, which come
    from registers, 64 tokens (delta_chunks.LEAST). Moonlight's on an H200, by 64 tokens and by 32:
    4,096 rows in 16 groups behind 2,000 tokens 1,486 and 1,889 us, a prompt of 8,192 4,603 and
    6,114. Eight bits aren't timed yet."""
    if dtype == torch.float32:
        return (64, 16, 8, 1) if shared >= 190_000 else (16, 16, 8, 1)
    if kv.scale is None:
        if shared >= 225_000:
            return 64, 64, 8, 2
        return (64, 32, 8, 2) if shared >= 150_000 else (32, 32, 8, 1)
    return (64, 64, 8, 2) if shared >= 190_000 else (32, 32, 8, 2)


def _stored(kv: LatentKv, nothing: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns vectors, what lies beside them, and the scale. nothing: stands for one that isn't
    read."""
    return kv.latent, kv.turned, nothing if kv.scale is None else kv.scale


def _strides(kv: LatentKv) -> tuple[int, int]:
    return kv.latent.stride(0), kv.turned.stride(0)


def _widths(kv: LatentKv) -> dict[str, int]:
    rank, turning = kv.value_width, kv.turned.shape[2]
    pads = {
        "RANK_PAD": max(2 * LEAST, next_power_of_2(rank)),
        "TURNING_PAD": max(16, next_power_of_2(turning)),
    }
    return {"EIGHT": kv.scale is not None, "RANK": rank, "TURNING": turning, **pads}


def _how(q: Tensor, shape: Shape) -> dict[str, object]:
    _, tokens, warps, stages = shape
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    return {"TOKENS": tokens, "PRECISION": precision, "num_warps": warps, "num_stages": stages}
