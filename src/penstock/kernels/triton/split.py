"""Products whose K is split among programs: each leaves float32 sums, and whoever comes last at a counter adds them up
in order, so that the result doesn't depend on who that is. It knows a tile of sums; no matrix.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def joined(sums, parts, arrived, tile, part, SPLIT: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """sums [R, C] of one of a tile's SPLIT parts -> the sums of all, and whether this program is the one that has
    them. parts [tiles, SPLIT, R, C], arrived [tiles]: zeros before and after."""
    inner = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    mine = parts + tile.to(tl.int64) * (SPLIT * R * C) + inner
    tl.store(mine + part * R * C, sums)
    tl.debug_barrier()
    last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1
    if last:
        sums = tl.zeros((R, C), tl.float32)
        for other in tl.static_range(SPLIT):  # whose loads are under way together
            sums += tl.load(mine + other * R * C, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    return sums, last
