"""The loop of attention kernels over stored tokens. `walk` computes a tile of queries of one KV
head over a range of tokens, on tensor cores. Other functions of this module divide work among
programs.

Knows block tables, masks and the running softmax (FlashAttention). `prefix`, `prefill`, `decode`
and `one_row_attention` load queries, call `walk`, and write the results. The running softmax of a
query has its largest score (state_max), a sum of exponentials (state_sum) and a weighted sum of
values (mixed). Scores are base-2 logarithms (`scale` includes log2 e), so that an exponential is
one instruction. M: queries of a tile, D: numbers of a head, T: tokens of a tile, Hkv: KV heads;
lane: index of a number in its head."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.layer_kv import TURNED

LOG2_E = 1.4426950408889634
BESIDE: tl.constexpr = tl.constexpr(TURNED)


@triton.jit
def at_head(keys, values, head, stride_block, WIDTH: tl.constexpr, EIGHT: tl.constexpr):
    """Returns pointers to K and V of a KV head, in their own dtypes, and the stride of V's blocks
    in numbers.

    EIGHT: which of K and V are in eight bits: 0 none, 1 V, 2 both (kernels/layer_kv.py). If V is
    not in eight bits, `plain_cells` computes its address from K's, and the V pointer returned here
    is not used."""
    at_keys, stride_values = keys + head * (32 * WIDTH), stride_block
    if EIGHT > 0:
        wider: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth // 8
        # stride of V's heads, counted in e4m3 numbers
        apart: tl.constexpr = 16 * WIDTH * (wider + 1)
        at_keys = keys + head * (apart // wider)
        values += head * apart
        stride_values = stride_block * wider
    return at_keys, values, stride_values


@triton.jit
def load_blocks(table, at, last, token):
    """Returns the block id of each token of a tile, [tokens] int64. table: block table. at: the
    tile's first token, a multiple of 16. token: 0 to the tile's size - 1. last: one past the last
    token to read; ids are loaded for all tokens of its block."""
    return tl.load(table + at // 16 + token // 16, mask=at + token // 16 * 16 < last, other=0).to(
        tl.int64
    )


@triton.jit
def plain_cells(keys, block, where, stride_block, lane, WIDTH: tl.constexpr):
    """Returns pointers [tokens, lanes] to K and to V, neither in eight bits. keys: from `at_head`.
    block: block id of each token. where: each token's index in its sequence."""
    cell = (keys + block.to(tl.int64) * stride_block + where % 16 * WIDTH)[:, None] + lane[None, :]
    return cell, cell + 16 * WIDTH


@triton.jit
def eight_cells(keys, values, block, token, stride_block, stride_values, lane, WIDTH: tl.constexpr):
    """Returns pointers [tokens, lanes] to K, of any dtype, and pointers [lanes, tokens] to V in
    eight bits, which is stored transposed (kernels/layer_kv.py). block: from `load_blocks`. keys,
    values: from `at_head`."""
    cell = (keys + block * stride_block + token % 16 * WIDTH)[:, None] + lane[None, :]
    turned = token % 16 // BESIDE * (BESIDE * WIDTH) + token % BESIDE
    beside = (values + block * stride_values + turned)[None, :] + lane[:, None] * BESIDE
    # tells the compiler that the values of BESIDE tokens are contiguous, which it doesn't find out
    # itself
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
    """Loads K [tokens, lanes] and V [lanes, tokens] of a tile, with V in eight bits. at: the tile's
    first token. last: one past the last token; all tokens of its block are loaded."""
    block = load_blocks(table, at, last, token)
    cell, beside = eight_cells(keys, values, block, token, stride_block, stride_values, lane, WIDTH)
    there = at + token // 16 * 16 < last
    k = tl.load(cell, mask=there[:, None] & inside[None, :], other=0.0)
    return k, tl.load(beside, mask=there[None, :] & inside[:, None], other=0.0)


@triton.jit
def scales_of(scale, scales, head, KV_HEADS: tl.constexpr, EIGHT: tl.constexpr):
    """Returns the factor of a KV head's scores and that of its outputs; they include the scales of
    K and V in eight bits. scale: factor of scores. scales: [2, Hkv], from LayerKv."""
    of_values = 1.0
    if EIGHT > 0:
        of_values = tl.load(scales + KV_HEADS + head)
    if EIGHT == 2:
        scale *= tl.load(scales + head)
    return scale, of_values


@triton.jit
def with_eight(queries, scale, EIGHT: tl.constexpr):
    """Converts queries for products with K. Returns the queries and the factor of their scores. If
    K is in eight bits (EIGHT = 2), queries become float16, since e4m3 widens to float16 in one
    instruction for two numbers, and to bfloat16 in five. They are scaled so that only magnitudes
    above a million overflow; those below 2^-20 don't affect a score."""
    if EIGHT == 2 and queries.dtype != tl.float32:
        queries, scale = (queries * 0.0625).to(tl.float16), scale * 16
    return queries, scale


@triton.jit
def capped(scores, cap):
    """Returns cap * tanh(scores / cap). Both are base-2 logarithms, see the module's docstring."""
    return cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.8853900817779268 / cap))))


@triton.jit
def walk(
    q,  # [M, D]
    state_max,  # [M] float32, base-2 logarithms
    state_sum,  # [M] float32
    mixed,  # [M, D] float32
    at_keys,  # pointers from `at_head`
    at_values,
    table,  # block table of the sequence
    begin,  # first token, the start of a block
    end,  # one past the last token
    position,  # [M] positions of the queries: a query sees tokens up to its own
    window,
    scale,
    cap,
    stride_block,
    stride_values,
    CAPPED: tl.constexpr,
    # False only if every query sees every token, and TOKENS divides their number
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens of a tile
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    EIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    token = tl.arange(0, TOKENS)
    lane = tl.arange(0, WIDTH_PAD)
    inside = lane < WIDTH
    # dtype to which V in eight bits is widened
    wide: tl.constexpr = tl.float32 if q.dtype == tl.float32 else tl.float16
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
            # Not -inf: a query with a window may see no token of a tile, and -inf minus -inf is
            # NaN.
            scores = tl.where(seen, scores, -1e30)
        # The scale is positive, so it may be applied after the maximum, in one instruction with the
        # subtraction.
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
    """Loads a tile of M = QUERIES queries: the RATIO query heads of KV head `head`, for rows from
    `row` on, before row_end. Returns each query's row [M] and query head [M], a mask of the queries
    that exist [M], the mask of their numbers [M, D], and the queries [M, D]."""
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
    """Returns the running softmax of queries that have seen no token: state_max, state_sum,
    mixed."""
    return (
        tl.full([QUERIES], -1e30, tl.float32),
        tl.zeros([QUERIES], tl.float32),
        tl.zeros([QUERIES, WIDTH_PAD], tl.float32),
    )


@triton.jit
def begun(
    sinks, query_head, there, QUERIES: tl.constexpr, WIDTH_PAD: tl.constexpr, SINKS: tl.constexpr
):
    """Returns the running softmax of queries before their first token. SINKS: the sink of a query's
    head counts as a token without a value. If several programs share a query, only one of them may
    count it. sinks: [H]. there: mask of the queries that exist."""
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
    """Updates the running softmax of one row's queries with a tile of tokens. All queries see the
    same tokens. keys, values: [T, D]. stored: mask [T] of the tokens that are seen. Other
    arguments: see `walk_row`.

    EIGHT > 0: queries, mixed and values are transposed: [D, M], [D, M] and [D, T]. A product on
    tensor cores has 16 rows (tokens or numbers of a head) and 8 columns (queries), so it has less
    padding than untransposed. V needs no rearranging: 32 tokens of width 128 take 435 instructions,
    and untransposed 1,670."""
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
    queries,  # [M, D]; if EIGHT, [D, M]: transposed by `turned`
    state_max,  # [M] float32, base-2 logarithms
    state_sum,  # [M] float32
    mixed,  # [M, D] float32; if EIGHT, [D, M]
    at_keys,  # pointers from `at_head`
    at_values,
    table,  # block table of the row
    begin,  # first token, the start of a block
    last,  # one past the last token
    first,  # first visible token, if there is a window
    scale,
    cap,
    stride_block,
    stride_values,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens of a tile
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    EIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes the same as `walk` for the query heads of one decode query, which all see the same
    tokens. Returns state_max, state_sum and mixed."""
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
    """Returns x transposed if EIGHT > 0, else x. It converts queries between [M, D] and [D, M]."""
    if EIGHT > 0:
        x = tl.trans(x)
    return x


@triton.jit
def span(tokens, splits, split_tokens, TOKENS: tl.constexpr):
    """Returns how many of a row's `tokens` each program handles, a multiple of TOKENS. At most
    `splits` programs share the row, and only as many as get about split_tokens tokens or more."""
    tokens = tl.maximum(tokens, 1)
    used = tl.minimum(tl.cdiv(tokens, split_tokens), splits)
    return tl.cdiv(tl.cdiv(tokens, used), TOKENS) * TOKENS


@triton.jit
def owner(start, count, tile, ROWS: tl.constexpr, EACH: tl.constexpr = 128):
    """Returns the sequence g to which a tile of ROWS rows belongs, and the tile's first row.
    Sequence g has rows start[g] : start[g + 1]; start: [count + 1].

    Sequence g's tiles have the numbers from start[g] // ROWS + g on. These are at least as many as
    it needs, so no sum over sequences is necessary, and start[count] // ROWS + count tiles are
    enough for any `start`."""
    found = 0
    for at in range(0, count, EACH):
        each = at + tl.arange(0, EACH)
        first = tl.load(start + each, mask=each < count, other=2**30)
        found += tl.sum((first // ROWS + each <= tile).to(tl.int32), 0)
    index = found - 1
    begin = tl.load(start + index)
    return index, begin + (tile - begin // ROWS - index) * ROWS
