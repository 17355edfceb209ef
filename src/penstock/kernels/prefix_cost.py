"""Cost of attending rows as a prefix group: attention times of a column, measured on a device.

Each column with groups has a `prefix_cost.py` with its figures; this module has their types and
computes times for a model. Knows heads and bytes; the scheduler decides which rows share.
`benchmarks/prefix_groups.py` measures the figures, and docs/design/prefix_groups.md tells how well
they decide."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import torch

from penstock.kernels.ops import Ops


@dataclass(slots=True, frozen=True)
class PrefixCostTimes:
    """Times of one layer's attention, in seconds. The fields are those of
    `schedule.prefix_groups.SharingCosts`."""

    member_token: float  # per shared token that a row reads by itself
    member: float  # per row that continues from its group's result
    tile_token: float  # per shared token that a tile of members reads
    tile_members: int
    step: float  # per launch for groups


@dataclass(slots=True, frozen=True)
class MeasuredSharing:
    """Times measured on one device, per byte of KV, so that they apply to any head shape. bf16."""

    device: str
    member_byte: (
        float  # seconds per byte of shared K and V that a row reads by itself, from a cache
    )
    member: float  # seconds per byte of one token's K and V
    tile_byte: float  # seconds per byte that a tile reads
    step: float  # seconds

    def times(
        self, kv_heads: int, width: int, tile_members: int, kv_share: float = 1.0
    ) -> PrefixCostTimes:
        """Returns the times for a head shape. kv_share: bytes of K and V relative to bf16, if fewer
        bytes are read faster."""
        kv_bytes = 4 * kv_heads * width  # bytes of a token in a layer
        read = kv_bytes * kv_share
        return PrefixCostTimes(
            self.member_byte * read,
            self.member * kv_bytes,
            self.tile_byte * read,
            tile_members,
            self.step,
        )


class PrefixCost(Protocol):
    """A function that returns a column's times for a head shape on a device."""

    def __call__(
        self,
        heads: int,
        kv_heads: int,
        width: int,
        dtype: torch.dtype,
        device: str,
        kv_share: float,
    ) -> PrefixCostTimes: ...


def prefix_cost_times(
    ops: Ops,
    heads: int,
    kv_heads: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_share: float = 1.0,
) -> PrefixCostTimes:
    """Returns the times for the attention column of these ops."""
    found: PrefixCost = import_module(
        f"penstock.kernels.{ops.why['attention'][0]}.attention.prefix_cost"
    ).prefix_cost
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return found(heads, kv_heads, width, dtype, name, kv_share)
