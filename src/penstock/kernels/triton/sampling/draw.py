"""Samples one token per row without filters. It samples first a tile of 128 logits, from the tiles'
peaks (largest logit) and masses (sum of exponentials), then a token of that tile. Both use the
Gumbel-max method. The contract is in reference/sampling/sample.py.

Greedy rows take the largest logit, in the same launch. Knows rows of logits and random numbers; no
filters."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.pdl import release, wait
from penstock.kernels.triton.sampling.noise import LANES, TILES, gumbel, row_keys
from penstock.kernels.triton.sampling.tile_sums import load_tiles, row_of, state_of


@triton.jit
def read_row(peaks, masses, tops, i, tiles, scale, SHARED: tl.constexpr, NT: tl.constexpr):
    """Reads the tile sums of row i. Returns the tile ids [NT]; their peaks; the logarithms of their
    masses relative to the row's largest logit (top); the top; and True if all logits of the row are
    finite.

    scale: 1 / temperature. NT: number of tiles, rounded up to a power of two. `tile_sums` stores a
    tile's mass relative to the tile's own peak, so that its logarithm is finite even far below the
    top. SHARED: the tiles are a rank's part of a vocabulary; tops [n] has the top of the whole
    vocabulary, or NaN if a logit of any rank is not finite."""
    tile = tl.arange(0, NT)
    at = i.to(tl.int64) * tiles + tile
    peak = tl.load(peaks + at, mask=tile < tiles, other=float("-inf"))
    mass = tl.load(masses + at, mask=tile < tiles, other=0.0)
    if SHARED:
        top = tl.load(tops + i)
    else:
        top = tl.max(peak, axis=0)
    bad = tl.sum((mass != mass).to(tl.int32), axis=0) > 0
    good = (top > float("-inf")) & (top < float("inf")) & (bad == 0)
    below = tl.where(
        peak == float("-inf"), float("-inf"), (peak - tl.where(good, top, 0.0)) * scale
    )
    return tile, peak, tl.log(mass) + below, top, good


@triton.jit
def draw_once(
    logits,
    adjusted,
    line,
    tile,
    log_mass,
    top,
    scale,
    first,
    second,
    position,
    attempt,
    vocabulary,
    use_adjusted,
    before,
    HAS_ADJUSTED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Samples one token of a row. Returns the token int32, its logit, and the score of its tile.
    log_mass: logarithm of each tile's mass. first, second: from noise.row_keys. line: offset of the
    row's logits. before: number of the vocabulary's tiles before this rank's part."""
    score = log_mass + gumbel(first, second, position, attempt, TILES, before + tile)
    best = tl.max(score, axis=0)
    won = tl.argmax(score, axis=0)
    lane = tl.arange(0, TILE)
    token = won * TILE + lane
    logit = load_tiles(
        logits, adjusted, line, token, token < vocabulary, use_adjusted, HAS_ADJUSTED
    )
    score = (logit - top) * scale + gumbel(first, second, position, attempt, LANES, lane)
    place = tl.argmax(score, axis=0)
    value = tl.max(tl.where(lane == place, logit, float("-inf")), axis=0)
    return won * TILE + place, value, best


@triton.jit
def draw_kernel(
    logits,
    adjusted,
    row_ids,
    temperature,
    top_k,
    seed,
    sample,
    position,
    done,
    wants,
    peaks,
    masses,
    tokens,
    tops,
    scores,
    before,
    vocabulary,
    stride,
    tiles,
    BAD: tl.constexpr,
    NONE: tl.constexpr,
    MIN_T: tl.constexpr,
    ADJUSTS: tl.constexpr,
    ADDED: tl.constexpr,
    BY_ROW: tl.constexpr,
    HAS_ADJUSTED: tl.constexpr,
    SHARED: tl.constexpr,
    NT: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program i samples the token of row i (attempt 0; the filters may sample again). Rows that are
    done get NONE. SHARED: the logits are a rank's part of a vocabulary, after `before` tiles. Then
    scores[i] gets the score of the sampled tile; the rank with the largest score has the row's
    token. peaks, masses: from `tile_sums`."""
    wait(EARLY)
    release(EARLY)
    i = tl.program_id(0)
    row = row_of(row_ids, i, BY_ROW)
    live, use_adjusted = state_of(done, wants, row, ADJUSTS, BY_ROW, HAS_ADJUSTED)
    if live:
        warmth = tl.load(temperature + row)
        scale = 1.0 / tl.maximum(warmth, MIN_T)
        line = i.to(tl.int64) * stride
        tile, peak, log_mass, top, good = read_row(peaks, masses, tops, i, tiles, scale, SHARED, NT)
        if (warmth <= 0) | (tl.load(top_k + row) == 1):
            won = tl.argmax(peak, axis=0)
            best = tl.max(peak, axis=0)
            lane = won * TILE + tl.arange(0, TILE)
            logit = load_tiles(
                logits, adjusted, line, lane, lane < vocabulary, use_adjusted, HAS_ADJUSTED
            )
            token = won * TILE + tl.argmax(logit, axis=0)
        else:
            first, second = row_keys(tl.load(seed + row), tl.load(sample + row))
            place = tl.load(position + i).to(tl.int32) + ADDED
            token, _, best = draw_once(
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
                0,
                vocabulary,
                use_adjusted,
                before,
                HAS_ADJUSTED,
                TILE,
            )
        tl.store(tokens + i, tl.where(good, before * TILE + token, BAD))
        if SHARED:
            tl.store(scores + i, best)
    else:
        tl.store(tokens + i, NONE)
