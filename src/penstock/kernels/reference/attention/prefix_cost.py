"""Times of prefix groups in plain torch, on a CPU. They were measured on one thread
(`benchmarks/prefix_groups.py --device cpu`).

All rows of a group are one product, so the time per tile counts once a group. The time per step is
that of torch's calls. It is counted once, although groups have calls of their own, since groups of
equal size and length are multiplied together (`tiles.py`)."""

from __future__ import annotations

import torch

from penstock.kernels.prefix_cost import MeasuredSharing, PrefixCostTimes

MEASURED = MeasuredSharing(
    "cpu", member_byte=7.2e-11, member=6.1e-10, tile_byte=8.3e-11, step=43e-6
)
WHOLE = 1 << 30


def prefix_cost(
    heads: int, kv_heads: int, width: int, dtype: torch.dtype, device: str, kv_share: float = 1.0
) -> PrefixCostTimes:
    """Returns the times for a head shape; see `kernels.prefix_cost.PrefixCost`. kv_share is not
    used: KV in eight bits is widened first, so it saves no time."""
    return MEASURED.times(kv_heads, width, WHOLE)
