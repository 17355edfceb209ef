"""When attending rows as a prefix group pays: times of a column's attention, as measured on a
device.

Each column that groups has a `prefix_cost.py` with its figures; here is their form and what they
come to for a model. It knows heads and bytes; who shares what is the scheduler's.
`benchmarks/prefix_groups.py` measures them, and docs/design/prefix_groups.md says how well they
decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import torch

from penstock.kernels.ops import Ops


@dataclass(slots=True, frozen=True)
class PrefixCostTimes:
    """Holds times of one layer's attention, in seconds. The fields are
    `schedule.prefix_groups.SharingCosts`'s."""

    member_token: float  # a row reads a shared token by itself
    member: float  # a row carries on from what its group saw
    tile_token: float  # a tile of members sees a shared token
    tile_members: int
    step: float  # the launch for groups


@dataclass(slots=True, frozen=True)
class MeasuredSharing:
    """Holds what was measured on one device: the same by a KV byte, which is what the head shapes
    differ by. bf16."""

    device: str
    member_byte: (
        float  # seconds a byte of K and V that a row reads by itself, shared ones: out of a cache
    )
    member: float  # seconds a byte of one token's K and V
    tile_byte: float  # seconds a byte that a tile reads
    step: float  # seconds

    def times(
        self, kv_heads: int, width: int, tile_members: int, kv_share: float = 1.0
    ) -> PrefixCostTimes:
        """kv_share: of bf16's bytes, that K and V take where fewer of them take less time to
        read."""
        kv_bytes = 4 * kv_heads * width  # of a token in a layer
        read = kv_bytes * kv_share
        return PrefixCostTimes(
            self.member_byte * read,
            self.member * kv_bytes,
            self.tile_byte * read,
            tile_members,
            self.step,
        )


class PrefixCost(Protocol):
    """A column's times for a head shape on a device."""

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
    """Returns the times of the column that these ops attend by."""
    found: PrefixCost = import_module(
        f"penstock.kernels.{ops.why['attention'][0]}.attention.prefix_cost"
    ).prefix_cost
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return found(heads, kv_heads, width, dtype, name, kv_share)
