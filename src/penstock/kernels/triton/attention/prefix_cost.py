"""Times of prefix groups on a GPU. They were measured on an H200 over 1,260 steps
(`benchmarks/prefix_groups.py`).

Other GPUs use the H200's times: only ratios of times matter, and these differ less between GPUs
than the times do."""

from __future__ import annotations

import torch

from penstock.kernels.prefix_cost import MeasuredSharing, PrefixCostTimes
from penstock.kernels.triton.attention.prefix import tile_members

MEASURED = (
    MeasuredSharing(
        "NVIDIA H200", member_byte=1.17e-13, member=5.4e-12, tile_byte=1.92e-13, step=5.8e-6
    ),
)


def prefix_cost(
    heads: int, kv_heads: int, width: int, dtype: torch.dtype, device: str, kv_share: float = 1.0
) -> PrefixCostTimes:
    """Returns the times for a head shape; see `kernels.prefix_cost.PrefixCost`."""
    found = [measured for measured in MEASURED if measured.device == device]
    members = tile_members(heads // kv_heads, width, dtype)
    return (found or MEASURED)[0].times(kv_heads, width, members, kv_share)
