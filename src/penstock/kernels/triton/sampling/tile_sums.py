"""Computes the peak and the mass of each tile of each row. A tile is 128 logits, its peak the
largest of them, its mass the sum of exp((logit - peak) / temperature).

Sampling, filters and log-probabilities use these arrays [n, tiles], and read logits again only in a
few tiles. Tiles are independent, so a row may be divided among any number of programs. Knows logits
and temperatures; nothing is sampled here."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.pdl import release, wait

LOG2E = 1.4426950408889634

# row_of: index in the per-row arrays of the i-th row of logits: row_ids[i], or i if there are no
# row ids


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
    """Returns two bools for a row: whether a token is sampled for it, and whether it is sampled
    from adjusted logits. row: the row's index in the per-row arrays."""
    live, use_adjusted = True, False
    if BY_ROW:
        live = tl.load(done + row) == 0
        if HAS_ADJUSTED:
            use_adjusted = (tl.load(wants + row) & ADJUSTS) != 0
    return live, use_adjusted


@triton.jit
def load_tiles(logits, adjusted, line, token, there, use_adjusted, HAS_ADJUSTED: tl.constexpr):
    """Loads logits of a row as float32; -inf where `there` is False. line: offset of the row's
    logits. token: ids. They come from `adjusted` if use_adjusted, else from `logits`."""
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
    """Writes peaks and masses of TILES tiles of a row, from tile `first` on. scale: log2(e) /
    temperature. A mass is NaN if a logit isn't finite."""
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
    on. Rows that are done are skipped. peaks, masses: outputs [n, tiles]."""
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
