"""walk: a tile of queries of one KV head over a stretch of stored tokens, on the tensor cores; how
programs share work.

It knows block tables, masks and the running softmax; who the queries are and what becomes of them
is for `prefix`, `prefill`, `decode` and `one_row_attention`. Scores live in powers of two (`scale`
holds log2 e), so that an exponential is one instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.layer_kv import TURNED

LOG2_E = 1.4426950408889634
BESIDE: tl.constexpr = tl.constexpr(TURNED)


@triton.jit
def at_head(keys, values, head, stride_block, WIDTH: tl.constexpr, EIGHT: tl.constexpr):
    """The layer's K and V at a KV head, and what V's blocks lie apart: K's and V's own pointers, in
    their own numbers.

    EIGHT: what is in eight bits, 0 nothing, 1 V, 2 K and V (kernels/layer_kv.py). Plain V is
    reached from K, which `plain_cells` does, and what is given of V here is not read.
    """
    at_keys, stride_values = keys + head * (32 * WIDTH), stride_block
    if EIGHT > 0:
        wider: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth // 8
        apart: tl.constexpr = 16 * WIDTH * (wider + 1)  # numbers of V between its heads
        at_keys = keys + head * (apart // wider)
        values += head * apart
        stride_values = stride_block * wider
    return at_keys, values, stride_values


@triton.jit
def load_blocks(table, at, last, token):
    """The blocks [tokens] of the tile from `at` on, which begins a block; tokens of a block have
    one mask, so that what is read of a block is read in one piece."""
    return tl.load(table + at // 16 + token // 16, mask=at + token // 16 * 16 < last, other=0).to(
        tl.int64
    )


@triton.jit
def plain_cells(keys, block, where, stride_block, lane, WIDTH: tl.constexpr):
    """Pointers [tokens, lanes] to K and to V of tokens `where`, which lie in `block`; keys:
    `at_head`'s."""
    cell = (keys + block.to(tl.int64) * stride_block + where % 16 * WIDTH)[:, None] + lane[None, :]
    return cell, cell + 16 * WIDTH


@triton.jit
def eight_cells(keys, values, block, token, stride_block, stride_values, lane, WIDTH: tl.constexpr):
    """Pointers [tokens, lanes] to K, whatever its dtype, and [lanes, tokens] to V in eight bits,
    which lies turned (kernels/layer_kv.py); block: `load_blocks`'s, keys, values: `at_head`'s."""
    cell = (keys + block * stride_block + token % 16 * WIDTH)[:, None] + lane[None, :]
    turned = token % 16 // BESIDE * (BESIDE * WIDTH) + token % BESIDE
    beside = (values + block * stride_values + turned)[None, :] + lane[:, None] * BESIDE
    # not found by itself
    return cell, tl.max_contiguous(tl.multiple_of(beside, [BESIDE, BESIDE]), [1, BESIDE])


@triton.jit
def load_eight(
    keys,
    values,
    table,
    at,
    last,
    token,
    lane,
    inside,
    stride_block,
    stride_values,
    WIDTH: tl.constexpr,
):
    """K [tokens, lanes] and V [lanes, tokens] of the tile from `at` on, whole blocks up to that of
    `last`."""
    block = load_blocks(table, at, last, token)
    cell, beside = eight_cells(keys, values, block, token, stride_block, stride_values, lane, WIDTH)
    there = at + token // 16 * 16 < last
    k = tl.load(cell, mask=there[:, None] & inside[None, :], other=0.0)
    return k, tl.load(beside, mask=there[None, :] & inside[:, None], other=0.0)


@triton.jit
def scales_of(scale, scales, head, KV_HEADS: tl.constexpr, EIGHT: tl.constexpr):
    """What a KV head's scores, and its answers, are multiplied by. scales: [2, Hkv], LayerKv's."""
    of_values = 1.0
    if EIGHT > 0:
        of_values = tl.load(scales + KV_HEADS + head)
    if EIGHT == 2:
        scale *= tl.load(scales + head)
    return scale, of_values


@triton.jit
def with_eight(queries, scale, EIGHT: tl.constexpr):
    """Queries as they are multiplied by K, and their scale. e4m3 widens to float16 in one
    instruction for two numbers, to bfloat16 in five; queries beyond a million would overflow it,
    what is below 2^-20 adds nothing to a score."""
    if EIGHT == 2 and queries.dtype != tl.float32:
        queries, scale = (queries * 0.0625).to(tl.float16), scale * 16
    return queries, scale


@triton.jit
def capped(scores, cap):
    """cap * tanh(scores / cap), both in powers of two: what e's powers would give, times log2 e."""
    return cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.8853900817779268 / cap))))


@triton.jit
def walk(
    q,  # [M, D]
    state_max,  # [M] float32, powers of two
    state_sum,  # [M] float32
    mixed,  # [M, D] float32
    at_keys,  # as `at_head` gives them
    at_values,
    table,  # the sequence's block table
    begin,  # first token, of a block
    end,  # one past the last token
    position,  # [M] the queries' positions: a query sees tokens up to its own
    window,
    scale,
    cap,
    stride_block,
    stride_values,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,  # False: every query sees every token, and TOKENS divides their number
    WINDOWED: tl.constexpr,
    TOKENS: tl.constexpr,  # a tile
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    EIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    token = tl.arange(0, TOKENS)
    lane = tl.arange(0, WIDTH_PAD)
    inside = lane < WIDTH
    wide: tl.constexpr = tl.float32 if q.dtype == tl.float32 else tl.float16  # of V in eight bits
    q, scale = with_eight(q, scale, EIGHT)
    for at in range(begin, end, TOKENS):
        where = at + token
        stored = where < end
        if EIGHT > 0:
            keys, values = load_eight(
                at_keys,
                at_values,
                table,
                at,
                end,
                token,
                lane,
                inside,
                stride_block,
                stride_values,
                WIDTH,
            )
            keys, values = keys.to(q.dtype), tl.trans(values).to(wide)
        else:
            if MASKED:
                block = tl.load(table + where // 16, mask=stored, other=0)
            else:
                block = tl.load(table + where // 16)
            cell, beside = plain_cells(at_keys, block, where, stride_block, lane, WIDTH)
            if MASKED:
                keys = tl.load(cell, mask=stored[:, None] & inside[None, :], other=0.0)
                values = tl.load(beside, mask=stored[:, None] & inside[None, :], other=0.0)
            elif WIDTH == WIDTH_PAD:
                keys = tl.load(cell)
                values = tl.load(beside)
            else:
                keys = tl.load(cell, mask=inside[None, :], other=0.0)
                values = tl.load(beside, mask=inside[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
        if CAPPED:
            scores = capped(scores * scale, cap) / scale
        if MASKED:
            seen = stored[None, :] & (where[None, :] <= position[:, None])
            if WINDOWED:
                seen &= where[None, :] > position[:, None] - window
            # Not -inf: a query of a window may see nothing of a whole tile, and -inf less -inf is
            # no number.
            scores = tl.where(seen, scores, -1e30)
        # The scale is positive: it may come after the maximum, and then it is one operation with
        # the subtraction.
        larger = tl.maximum(state_max, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - larger[:, None])
        if MASKED and WINDOWED:
            weights = tl.where(seen, weights, 0.0)
        shrink = tl.exp2(state_max - larger)
        state_sum = state_sum * shrink + tl.sum(weights, 1)
        mixed = tl.dot(
            weights.to(values.dtype), values, mixed * shrink[:, None], input_precision=PRECISION
        )
        state_max = larger
    return state_max, state_sum, mixed


@triton.jit
def queries_of(
    q,
    row,
    row_end,
    head,
    stride_q,
    RATIO: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """A tile of M = QUERIES: as many rows from `row` on as it holds (before row_end) x the query
    heads of a KV head -> rows [M], query heads [M], which there are [M], the same of their numbers
    [M, D], the queries [M, D]."""
    at = tl.arange(0, QUERIES)
    lane = tl.arange(0, WIDTH_PAD)
    member = row + at // RATIO
    query_head = head * RATIO + at % RATIO
    valid = (member < row_end) & (at < QUERIES // RATIO * RATIO)
    mask = valid[:, None] & (lane < WIDTH)[None, :]
    cell = member.to(tl.int64)[:, None] * stride_q + query_head[:, None] * WIDTH + lane[None, :]
    return member, query_head, valid, mask, tl.load(q + cell, mask=mask, other=0.0)


@triton.jit
def nothing_seen(QUERIES: tl.constexpr, WIDTH_PAD: tl.constexpr):
    """The running softmax of queries that have seen no token: state_max, state_sum, mixed."""
    return (
        tl.full([QUERIES], -1e30, tl.float32),
        tl.zeros([QUERIES], tl.float32),
        tl.zeros([QUERIES, WIDTH_PAD], tl.float32),
    )


@triton.jit
def begun(
    sinks, query_head, there, QUERIES: tl.constexpr, WIDTH_PAD: tl.constexpr, SINKS: tl.constexpr
):
    """The running softmax of queries [QUERIES] before their first token: a head's sink, where there
    are sinks [H], is a token without a value. Of several programs that share a query one alone
    begins so."""
    state_max, state_sum, mixed = nothing_seen(QUERIES, WIDTH_PAD)
    if SINKS:
        state_max = tl.load(sinks + query_head, mask=there, other=-1e30) * 1.4426950408889634
        state_sum += there.to(tl.float32)
    return state_max, state_sum, mixed


@triton.jit
def attend_tile(
    queries,
    state_max,
    state_sum,
    mixed,
    keys,
    values,
    stored,
    scale,
    cap,
    CAPPED: tl.constexpr,
    EIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of tokens that all queries of a row see: `walk_row`'s arguments, keys [T, D], values
    [T, D], stored [T].

    EIGHT > 0: queries, mixed and values come turned, [D, M], [D, M] and [D, T]: a tile of a tensor
    core has 16 rows, of tokens or numbers here, and 8 columns, of queries, so less of it is
    padding, and V needs no shuffling (32 tokens of width 128 take 435 instructions, the other way
    1,670)."""
    if EIGHT > 0:
        scores = tl.dot(keys.to(queries.dtype), queries, input_precision=PRECISION) * scale
        if CAPPED:
            scores = capped(scores, cap)
        scores = tl.where(stored[:, None], scores, -1e30)
        larger = tl.maximum(state_max, tl.max(scores, 0))
        weights = tl.exp2(scores - larger[None, :])
        shrink = tl.exp2(state_max - larger)
        state_sum = state_sum * shrink + tl.sum(weights, 0)
        wide: tl.constexpr = tl.float32 if queries.dtype == tl.float32 else tl.float16
        mixed *= shrink[None, :]
        mixed = tl.dot(values.to(wide), weights.to(wide), mixed, input_precision=PRECISION)
    else:
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        if CAPPED:
            scores = capped(scores, cap)
        scores = tl.where(stored[None, :], scores, -1e30)
        larger = tl.maximum(state_max, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(state_max - larger)
        state_sum = state_sum * shrink + tl.sum(weights, 1)
        mixed *= shrink[:, None]
        mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision=PRECISION)
    return larger, state_sum, mixed


@triton.jit
def walk_row(
    queries,  # [M, D]; all of a row in eight bits comes turned, as `turned` leaves it
    state_max,  # [M] float32, powers of two
    state_sum,  # [M] float32
    mixed,  # [M, D] float32, or turned
    at_keys,  # as `at_head` gives them
    at_values,
    table,  # the row's block table
    begin,  # first token, of a block
    last,  # one past the last token
    first,  # with a window: the first token that is seen
    scale,
    cap,
    stride_block,
    stride_values,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    TOKENS: tl.constexpr,  # a tile
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    EIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Does what `walk` does for the query heads of one decode row,
    which all see the same tokens."""
    token = tl.arange(0, TOKENS)
    lane = tl.arange(0, WIDTH_PAD)
    inside = lane < WIDTH
    for at in range(begin, last, TOKENS):
        where = at + token
        stored = where < last
        if EIGHT > 0:
            keys, values = load_eight(
                at_keys,
                at_values,
                table,
                at,
                last,
                token,
                lane,
                inside,
                stride_block,
                stride_values,
                WIDTH,
            )
            if WINDOWED:
                stored &= where >= first
        else:
            block = tl.load(table + where // 16, mask=stored, other=0)
            cell, beside = plain_cells(at_keys, block, where, stride_block, lane, WIDTH)
            if WINDOWED:
                stored &= where >= first
            held = stored[:, None] & inside[None, :]
            keys = tl.load(cell, mask=held, other=0.0)
            values = tl.load(beside, mask=held, other=0.0)
        state_max, state_sum, mixed = attend_tile(
            queries,
            state_max,
            state_sum,
            mixed,
            keys,
            values,
            stored,
            scale,
            cap,
            CAPPED,
            EIGHT,
            PRECISION,
        )
    return state_max, state_sum, mixed


@triton.jit
def turned(x, EIGHT: tl.constexpr):
    """[M, D] to [D, M] and back, for rows with anything in eight bits."""
    if EIGHT > 0:
        x = tl.trans(x)
    return x


@triton.jit
def span(tokens, splits, split_tokens, TOKENS: tl.constexpr):
    """Tokens that one of at most `splits` programs takes of `tokens`: whole tiles, and split_tokens
    or more."""
    tokens = tl.maximum(tokens, 1)
    used = tl.minimum(tl.cdiv(tokens, split_tokens), splits)
    return tl.cdiv(tl.cdiv(tokens, used), TOKENS) * TOKENS


@triton.jit
def owner(start, count, tile, ROWS: tl.constexpr, EACH: tl.constexpr = 128):
    """Which sequence of a CSR tile `tile` belongs to, and its first row; start [count + 1].

    Sequence g's tiles of ROWS rows are those from start[g] // ROWS + g on: never fewer than it
    needs, so that a tile is found without a sum over the sequences, and start[count] // ROWS +
    count tiles are enough whatever `start` holds.
    """
    found = 0
    for at in range(0, count, EACH):
        each = at + tl.arange(0, EACH)
        first = tl.load(start + each, mask=each < count, other=2**30)
        found += tl.sum((first // ROWS + each <= tile).to(tl.int32), 0)
    index = found - 1
    begin = tl.load(start + index)
    return index, begin + (tile - begin // ROWS - index) * ROWS
