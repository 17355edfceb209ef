"""Functions of the kernels over latents: load a program's queries, loop over a sequence's latents,
and write outputs. Latents are handled in two halves of RANK_PAD / 2 numbers, as that takes fewer
registers. M: queries of a program."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.pdl import fetch


@triton.jit
def _queries(
    q,
    rotated,
    row,
    row_end,
    part,
    stride_rotated,
    stride_head,
    HEADS: tl.constexpr,
    HELD: tl.constexpr,
    QUERIES: tl.constexpr,
    RANK: tl.constexpr,
    TURNING: tl.constexpr,
    RANK_PAD: tl.constexpr,
    TURNING_PAD: tl.constexpr,
):
    """Loads a tile of M = QUERIES queries: HELD heads of each of the rows from `row` on. q:
    absorbed queries [T, HEADS, RANK]. rotated: their rotated parts [T, HEADS, TURNING], with
    strides of rows and heads. part: which HELD of the HEADS heads. Returns each query's row and
    head, a mask of the queries that exist, and the queries in three parts: the two halves that are
    multiplied with latents [M, RANK_PAD / 2], and the rotated part [M, TURNING_PAD]."""
    at, turn, low = tl.arange(0, QUERIES), tl.arange(0, TURNING_PAD), tl.arange(0, RANK_PAD // 2)
    high = RANK_PAD // 2 + low
    member, head = row + at // HELD, part * HELD + at % HELD
    valid = (member < row_end) & (at < QUERIES // HELD * HELD) & (head < HEADS)
    at_row = member.to(tl.int64)[:, None]
    cell = q + (at_row * HEADS + head[:, None]) * RANK
    front = tl.load(cell + low[None, :], mask=valid[:, None] & (low < RANK)[None, :], other=0.0)
    back = tl.load(cell + high[None, :], mask=valid[:, None] & (high < RANK)[None, :], other=0.0)
    cell = rotated + at_row * stride_rotated + head[:, None] * stride_head
    turned = tl.load(
        cell + turn[None, :], mask=valid[:, None] & (turn < TURNING)[None, :], other=0.0
    )
    return member, head, valid, front, back, turned


@triton.jit
def _with_eight(front, back, turned, scale, of_eight, EIGHT: tl.constexpr):
    """Converts queries for products with stored latents. Returns the three parts of the queries,
    the factor of scores and the factor of outputs. If latents are in eight bits, queries become
    float16, as in `flash_loop.with_eight`; the unrotated parts are multiplied by the latents'
    scale, and all are divided by 16."""
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
def _fetch_tile(
    vectors,
    table,
    begin,
    end,
    stride_block,
    EIGHT: tl.constexpr,
    TOKENS: tl.constexpr,
    RANK: tl.constexpr,
    TURNING: tl.constexpr,
):
    """Prefetches the vectors of up to TOKENS tokens from `begin` on. LINE: numbers of a cache
    line."""
    LINE: tl.constexpr = 128 // (vectors.dtype.element_ty.primitive_bitwidth // 8)
    FROM: tl.constexpr = RANK if EIGHT else RANK + TURNING
    where = tl.minimum(begin + tl.arange(0, TOKENS), tl.maximum(end - 1, 0))
    block = tl.load(table + where // 16).to(tl.int64)
    cell = vectors + block * stride_block + where % 16 * FROM
    for at in tl.static_range(0, FROM, LINE):
        fetch(cell + at)


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
    """Computes the same as `flash_loop.walk` over latents. front, back, turned: queries, from
    `_queries`. low, high: halves of the weighted sums of latents [M, RANK_PAD / 2]. begin: the
    first token of a block. There is no second loop without masks for tokens that every query sees,
    since it would spill 848 bytes of registers a thread with eight warps."""
    token, lane, turn = tl.arange(0, TOKENS), tl.arange(0, RANK_PAD // 2), tl.arange(0, TURNING_PAD)
    beyond = RANK_PAD // 2 + lane
    FROM: tl.constexpr = RANK if EIGHT else RANK + TURNING  # stride of tokens, in numbers
    BESIDE: tl.constexpr = TURNING if EIGHT else FROM
    # sums of weights by column of a tile: a sum over columns would wait for all warps
    sums = tl.where(token[None, :] == 0, state_sum[:, None], 0.0)
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
        sums = sums * shrink[:, None] + weights
        weights = weights.to(one.dtype)
        low = tl.dot(weights, one, low * shrink[:, None], input_precision=PRECISION)
        high = tl.dot(weights, two, high * shrink[:, None], input_precision=PRECISION)
        state_max = larger
    return state_max, tl.sum(sums, 1), low, high


@triton.jit
def _write(to, low, high, share, valid, RANK: tl.constexpr, RANK_PAD: tl.constexpr):
    """Writes outputs to pointers `to` [M], where the mask valid [M] is True. low, high: halves of
    the outputs [M, RANK_PAD / 2]. share: factor of each output, [M]."""
    lane, there = tl.arange(0, RANK_PAD // 2)[None, :], valid[:, None]
    beyond = RANK_PAD // 2 + lane
    dtype: tl.constexpr = to.dtype.element_ty
    tl.store(to[:, None] + lane, (low * share[:, None]).to(dtype), mask=there & (lane < RANK))
    tl.store(to[:, None] + beyond, (high * share[:, None]).to(dtype), mask=there & (beyond < RANK))
