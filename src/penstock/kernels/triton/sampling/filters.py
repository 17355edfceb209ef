"""The sampling filters min_p, top_k and top_p. A row whose sampled token is filtered out is sampled
again, up to 8 times. After that, the last token that the filters keep (the cut) is searched, and
the row is sampled from the kept tokens.

The decisions are those of reference/sampling/filters.py, but nothing is sorted. There is one
program per row; it returns at once if the row has no filter. To decide about a token, it needs the
mass of the tokens above it, or the number of tokens with larger logits. Both are computed from the
tiles whose largest logit is high enough; the ids of these tiles are listed first. So for a row with
few likely tokens few tiles are read, and for a row with many likely tokens all. `filter_bounds.py`
defines masses and bounds."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.pdl import release, wait
from penstock.kernels.triton.sampling.draw import draw_once, read_row
from penstock.kernels.triton.sampling.filter_bounds import (
    _ALL_IDS,
    _LOWEST,
    _inside,
    _list,
    _masses,
    _some,
    _top_k_bound,
    _top_p_bound,
)
from penstock.kernels.triton.sampling.noise import LANES, TILES, gumbel, row_keys
from penstock.kernels.triton.sampling.tile_sums import load_tiles, row_of


@triton.jit
def _draw_inside(
    logits,
    adjusted,
    line,
    listed,
    inner,
    tile,
    peak,
    tiles,
    top,
    scale,
    scale2,
    value,
    bound,
    k_value,
    k_bound,
    floor,
    first,
    second,
    position,
    attempt,
    vocabulary,
    use_adjusted,
    HAS_ADJUSTED: tl.constexpr,
    NT: tl.constexpr,
    SOME: tl.constexpr,
    TILE: tl.constexpr,
):
    """Samples from the tokens of a row that the filters keep: those inside both bounds, (value,
    bound) of top_p and (k_value, k_bound) of top_k, whose e is at least `floor` (min_p). All other
    tokens count as -inf. listed: ids of the tiles that may have such tokens. inner: scratch for
    these tiles' masses."""
    count = _list(listed, tile, tiles, peak >= tl.maximum(value, k_value))
    tl.store(inner + tile, tl.zeros((NT,), tl.float32), mask=tile < tiles)
    tl.debug_barrier()
    for start in range(0, count, SOME):
        place = start + tl.arange(0, SOME)
        token, logit = _some(
            logits,
            adjusted,
            line,
            listed,
            start,
            count,
            vocabulary,
            use_adjusted,
            HAS_ADJUSTED,
            SOME,
            TILE,
        )
        e = tl.exp2((logit - top) * scale2)
        stays = (
            _inside(logit, token, value, bound)
            & _inside(logit, token, k_value, k_bound)
            & (e >= floor)
        )
        where = tl.load(listed + place, mask=place < count, other=0)
        tl.store(inner + where, tl.sum(tl.where(stays, e, 0.0), axis=1), mask=place < count)
    tl.debug_barrier()
    log_mass = tl.log(tl.load(inner + tile, mask=tile < tiles, other=0.0))
    won = tl.argmax(log_mass + gumbel(first, second, position, attempt, TILES, tile), axis=0)
    lane = tl.arange(0, TILE)
    token = won * TILE + lane
    logit = load_tiles(
        logits, adjusted, line, token, token < vocabulary, use_adjusted, HAS_ADJUSTED
    )
    stays = _inside(logit, token, value, bound) & _inside(logit, token, k_value, k_bound)
    stays = stays & (tl.exp2((logit - top) * scale2) >= floor)
    score = (logit - top) * scale + gumbel(first, second, position, attempt, LANES, lane)
    return won * TILE + tl.argmax(tl.where(stays, score, float("-inf")), axis=0)


@triton.jit
def filter_kernel(
    logits,
    adjusted,
    row_ids,
    temperature,
    top_p,
    top_k,
    min_p,
    seed,
    sample,
    position,
    done,
    wants,
    peaks,
    masses,
    lists,
    inners,
    tokens,
    vocabulary,
    stride,
    tiles,
    MIN_T: tl.constexpr,
    LOG2E: tl.constexpr,
    ADJUSTS: tl.constexpr,
    ADDED: tl.constexpr,
    ATTEMPTS: tl.constexpr,
    SHIFT: tl.constexpr,
    BY_ROW: tl.constexpr,
    HAS_ADJUSTED: tl.constexpr,
    NT: tl.constexpr,
    SOME: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program i handles row i. If tokens[i], which `draw` sampled, is filtered out, it samples the
    row again and replaces it."""
    wait(EARLY)
    release(EARLY)
    i = tl.program_id(0)
    row = row_of(row_ids, i, BY_ROW)
    live, use_adjusted = True, False
    if BY_ROW:
        live = tl.load(done + row) == 0
    warmth, p, k, floor = (
        tl.load(temperature + row),
        tl.load(top_p + row),
        tl.load(top_k + row),
        tl.load(min_p + row),
    )
    by_k = (k > 0) & (k < vocabulary)
    asks = (warmth > 0) & (k != 1) & ((p < 1) | by_k | (floor > 0))
    if live & asks:
        x = tl.load(tokens + i)
        if x >= 0:
            shift = tl.full((), SHIFT, tl.int32)
            if HAS_ADJUSTED:
                use_adjusted = (tl.load(wants + row) & ADJUSTS) != 0
                shift = tl.where(use_adjusted, 0, SHIFT)
            scale = 1.0 / tl.maximum(warmth, MIN_T)
            scale2 = scale * LOG2E
            line = i.to(tl.int64) * stride
            listed, inner = lists + i.to(tl.int64) * tiles, inners + i.to(tl.int64) * tiles
            tile, peak, log_mass, top, _good = read_row(
                peaks, masses, masses, i, tiles, scale, False, NT
            )
            k_value, k_bound = (
                tl.full((), float("-inf"), tl.float32),
                tl.full((), _ALL_IDS, tl.int32),
            )
            if by_k:
                k_value, k_bound = _top_k_bound(
                    logits,
                    adjusted,
                    line,
                    listed,
                    tile,
                    tiles,
                    peak,
                    top,
                    k,
                    scale2,
                    vocabulary,
                    use_adjusted,
                    shift,
                    HAS_ADJUSTED,
                    SOME,
                    TILE,
                )
            allowed = tl.full((), float("inf"), tl.float32)
            if p < 1:
                if by_k | (floor > 0):
                    reach = (peak >= k_value) & (tl.exp2((peak - top) * scale2) >= floor)
                    count = _list(listed, tile, tiles, reach)
                    left = _masses(
                        logits,
                        adjusted,
                        line,
                        listed,
                        count,
                        k_value,
                        k_bound,
                        floor,
                        top,
                        scale2,
                        vocabulary,
                        use_adjusted,
                        HAS_ADJUSTED,
                        SOME,
                        TILE,
                    )
                else:
                    left = tl.sum(tl.exp(log_mass), axis=0)
                allowed = left * p
            first, second = row_keys(tl.load(seed + row), tl.load(sample + row))
            place = tl.load(position + i).to(tl.int32) + ADDED
            # If top_p rejects a token, the token is below the cut. Then all tokens below it are
            # rejected too, and the search for the cut begins above it.
            no_value, no_token = tl.full((), _LOWEST, tl.float32), tl.full((), _ALL_IDS, tl.int32)
            value = load_tiles(logits, adjusted, line, x, x >= 0, use_adjusted, HAS_ADJUSTED)
            attempt, stays = 0, 0
            while (stays == 0) & (attempt < ATTEMPTS):
                if attempt > 0:
                    x, value, _ = draw_once(
                        logits,
                        adjusted,
                        line,
                        tile,
                        log_mass,
                        top,
                        scale,
                        first,
                        second,
                        place,
                        attempt,
                        vocabulary,
                        use_adjusted,
                        0,
                        HAS_ADJUSTED,
                        TILE,
                    )
                inside = _inside(value, x, k_value, k_bound) & (
                    tl.exp2((value - top) * scale2) >= floor
                )
                inside = inside & ((value > no_value) | ((value == no_value) & (x < no_token)))
                stays = inside.to(tl.int32)
                if inside & (p < 1):
                    count = _list(listed, tile, tiles, peak >= value)
                    above = _masses(
                        logits,
                        adjusted,
                        line,
                        listed,
                        count,
                        value,
                        x - 1,
                        0.0,
                        top,
                        scale2,
                        vocabulary,
                        use_adjusted,
                        HAS_ADJUSTED,
                        SOME,
                        TILE,
                    )
                    if above >= allowed:
                        stays = 0
                        no_value, no_token = value, x
                attempt += 1
            if stays == 0:
                value, bound = (
                    tl.full((), float("-inf"), tl.float32),
                    tl.full((), _ALL_IDS, tl.int32),
                )
                if p < 1:
                    lowest = tl.maximum(no_value, k_value)
                    value, bound = _top_p_bound(
                        logits,
                        adjusted,
                        line,
                        listed,
                        tile,
                        tiles,
                        peak,
                        top,
                        lowest,
                        allowed,
                        scale2,
                        vocabulary,
                        use_adjusted,
                        shift,
                        HAS_ADJUSTED,
                        SOME,
                        TILE,
                    )
                x = _draw_inside(
                    logits,
                    adjusted,
                    line,
                    listed,
                    inner,
                    tile,
                    peak,
                    tiles,
                    top,
                    scale,
                    scale2,
                    value,
                    bound,
                    k_value,
                    k_bound,
                    floor,
                    first,
                    second,
                    place,
                    ATTEMPTS,
                    vocabulary,
                    use_adjusted,
                    HAS_ADJUSTED,
                    NT,
                    SOME,
                    TILE,
                )
            tl.store(tokens + i, x)
