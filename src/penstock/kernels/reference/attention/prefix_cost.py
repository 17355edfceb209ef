"""Cost of prefix groups in plain torch, measured on one thread of a CPU
(`benchmarks/prefix_groups.py --device cpu`).

A group is one product for all its members: there are no tiles within a group. The step's cost is
that of torch's calls, although each group has its own: groups of equal size and length are
multiplied together (`tiles.py`)."""

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
    """Returns the times of this column; see `PrefixCost`. KV in eight bits is widened first, which
    saves no time."""
    return MEASURED.times(kv_heads, width, WHOLE)
