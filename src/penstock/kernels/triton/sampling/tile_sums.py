"""Computes each tile's largest logit (peak) and mass. A tile has 128 logits. A tile's mass is the
sum of exp((logit - peak) / temperature).

Sampling, filters and log-probabilities use these arrays [n, tiles], and read logits again only in a
few tiles. Tiles are independent, so a row may be divided among any number of programs. Knows logits
and temperatures; nothing is sampled here."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.pdl import release, wait

LOG2E = 1.4426950408889634

# index of a line's row in the per-row arrays: row_ids[i], or i without row ids


@triton.jit
def row_of(row_ids, i, BY_ROW: tl.constexpr):
    row = i
    if BY_ROW:
        row = tl.load(row_ids + i)
    return row.to(tl.int64)


@triton.jit
def state_of(
    done, wants, row, ADJUSTS: tl.constexpr, BY_ROW: tl.constexpr, HAS_ADJUSTED: tl.constexpr
):
    """Returns True if a token is sampled for the row, and True if it is sampled from adjusted
    logits. row: the row's index in the per-row arrays."""
    live, use_adjusted = True, False
    if BY_ROW:
        live = tl.load(done + row) == 0
        if HAS_ADJUSTED:
            use_adjusted = (tl.load(wants + row) & ADJUSTS) != 0
    return live, use_adjusted


@triton.jit
def load_tiles(logits, adjusted, line, token, there, use_adjusted, HAS_ADJUSTED: tl.constexpr):
    """Returns logits of a row as float32; -inf where `there` is False. token: a block of ids. line:
    offset of the row's logits."""
    if HAS_ADJUSTED:
        if use_adjusted:
            value = tl.load(adjusted + line + token, mask=there, other=float("-inf"))
        else:
            value = tl.load(logits + line + token, mask=there, other=float("-inf")).to(tl.float32)
    else:
        value = tl.load(logits + line + token, mask=there, other=float("-inf")).to(tl.float32)
    return value


@triton.jit
def _tiles(
    source,
    line,
    peak,
    mass,
    first,
    scale,
    vocabulary,
    tiles,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Returns peaks of `TILES` tiles from `first` on, and sums of exp2((l - peak) * scale), NaN if
    a logit isn't finite."""
    tile = first + tl.arange(0, TILES)
    token = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    logit = tl.load(source + line + token, mask=token < vocabulary, other=float("-inf")).to(
        tl.float32
    )
    top = tl.max(logit, axis=1)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2((logit - base[:, None]) * scale), axis=1)
    tl.store(peak + tile, top, mask=tile < tiles)
    tl.store(mass + tile, total, mask=tile < tiles)


@triton.jit(do_not_specialize=["rounds"])
def tile_sums_kernel(
    logits,
    adjusted,
    row_ids,
    temperature,
    done,
    wants,
    peaks,
    masses,
    vocabulary,
    stride,
    tiles,
    rounds,
    LOG2E: tl.constexpr,
    MIN_T: tl.constexpr,
    ADJUSTS: tl.constexpr,
    BY_ROW: tl.constexpr,
    HAS_ADJUSTED: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (i, part) computes `rounds` * TILES tiles of row i, from tile part * rounds * TILES
    on. Rows that are done are skipped."""
    wait(EARLY)
    release(EARLY)
    i = tl.program_id(0)
    row = row_of(row_ids, i, BY_ROW)
    live, use_adjusted = state_of(done, wants, row, ADJUSTS, BY_ROW, HAS_ADJUSTED)
    if live:
        scale = LOG2E / tl.maximum(tl.load(temperature + row), MIN_T)
        line = i.to(tl.int64) * stride
        peak, mass = peaks + i.to(tl.int64) * tiles, masses + i.to(tl.int64) * tiles
        first = tl.program_id(1) * rounds * TILES
        last = tl.minimum(first + rounds * TILES, tiles)
        if use_adjusted:
            for start in range(first, last, TILES):
                _tiles(adjusted, line, peak, mass, start, scale, vocabulary, tiles, TILES, TILE)
        else:
            for start in range(first, last, TILES):
                _tiles(logits, line, peak, mass, start, scale, vocabulary, tiles, TILES, TILE)
