"""Joins partial sums of products whose K is divided among programs (split-K). Each program writes
float32 sums. The last one to finish, which a counter determines, adds all sums in a fixed order, so
that the result doesn't depend on which program is last. Knows tiles of sums; no matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.grid import cdiv


def split_launch(
    out: Tensor,
    arrived: Tensor,
    shape: tuple[int, int],
    tile: tuple[int, int],
    turns: int,
    split: int,
) -> tuple[tuple[int, int, int], int, Tensor]:
    """Computes the launch of a product whose K may be divided into parts. Returns the grid (output
    tiles, parts of K, row tiles), the iterations of a part, and a float32 buffer for partial sums
    (`out` if there is only one part).

    shape: (outputs, rows) of the product. tile: (outputs, rows) of a program. arrived: counters, at
    least one for each tile. turns: iterations over the whole K. split: the most parts."""
    each = cdiv(turns, split)
    splits, of_n, of_m = cdiv(turns, each), cdiv(shape[0], tile[0]), cdiv(shape[1], tile[1])
    parts = out
    if splits > 1:
        assert of_n * of_m <= len(arrived), "a tile has a counter"
        parts = torch.empty(
            of_n * of_m * splits * tile[0] * tile[1], dtype=torch.float32, device=out.device
        )
    return (of_n, splits, of_m), each, parts


@triton.jit
def joined(sums, parts, arrived, tile, part, SPLIT: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Stores a program's partial sums [R, C] and joins them if it is the last program of its tile.
    Returns the sums of all SPLIT parts and True in the last program, and its own sums and False in
    others.

    part: the program's part of K. parts: buffer [tiles, SPLIT, R, C]. arrived: counters [tiles],
    zeros before and after the launch."""
    inner = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    mine = parts + tile.to(tl.int64) * (SPLIT * R * C) + inner
    tl.store(mine + part * R * C, sums)
    tl.debug_barrier()
    last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1
    if last:
        sums = tl.zeros((R, C), tl.float32)
        # unrolled, so that all parts are loaded at the same time
        for other in tl.static_range(SPLIT):
            sums += tl.load(mine + other * R * C, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    return sums, last
