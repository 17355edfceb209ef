"""open_collectives: by what the ranks of a model add up on a kind of device. It knows devices; no
models."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.parallel.collectives import Collectives, Gloo


def open_collectives(
    meeting: Path, rank: int, size: int, seconds: float, device: torch.device
) -> Collectives:
    """Returns a rank's end, which has not met the others. meeting: a file that all ranks see, new
    for each model. seconds: the longest that a rank waits for another."""
    if device.type == "cpu":
        return Gloo(meeting, rank, size, seconds)
    from penstock.ranks.gpu_collectives import GpuCollectives

    return GpuCollectives(meeting, rank, size, seconds, device)
