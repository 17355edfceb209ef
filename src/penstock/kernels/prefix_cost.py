"""Estimated times of attention with and without prefix groups (rows that share a prefix, which is
read once for all of them). By them the scheduler decides which rows form a group.

Each column (package of implementations) has a `prefix_cost.py` with times measured on a device.
This module has their types and computes the times for a model. Knows heads and bytes; no rows.
`benchmarks/prefix_groups.py` measures the times; docs/design/prefix_groups.md tells how good the
decisions are."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import torch

from penstock.kernels.ops import Ops


@dataclass(slots=True, frozen=True)
class PrefixCostTimes:
    """Times of one layer's attention in seconds, with the fields of
    `schedule.prefix_groups.SharingCosts`. A member is a row of a prefix group; a tile is the
    members that one program handles."""

    member_token: float  # per row and token of the prefix, if each row reads the prefix itself
    member: float  # per row of a group, for joining the group's result with the row's own tokens
    tile_token: float  # per tile and token of the prefix, if the members of a tile read it together
    tile_members: int
    step: float  # per step that has any group, for the additional launch


@dataclass(slots=True, frozen=True)
class MeasuredSharing:
    """Times measured on one device in bf16. The times of reading are per byte of KV, so that they
    apply to any head shape."""

    device: str
    member_byte: (
        # seconds per byte of the prefix's K and V that a row reads itself; it is mostly in the
        # GPU's or CPU's cache
        float
    )
    member: float  # seconds per byte of one token's K and V
    tile_byte: float  # seconds per byte of the prefix's K and V that a tile reads
    step: float  # seconds per step that has any group

    def times(
        self, kv_heads: int, width: int, tile_members: int, kv_share: float = 1.0
    ) -> PrefixCostTimes:
        """Returns the times for a head shape. width: numbers of a head. tile_members: rows of a
        group that one program handles. kv_share: bytes of K and V relative to bf16; 1 if fewer
        bytes are not read faster."""
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
    """The type of a column's function `prefix_cost`. It returns the column's times for a head shape
    on a device."""

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
    """Returns the times of the attention that `ops` uses. width: numbers of a head. kv_share: bytes
    of K and V relative to the model's dtype."""
    found: PrefixCost = import_module(
        f"penstock.kernels.{ops.why['attention'][0]}.attention.prefix_cost"
    ).prefix_cost
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return found(heads, kv_heads, width, dtype, name, kv_share)
