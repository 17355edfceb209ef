"""open_collectives: chooses the collectives for a device. Knows devices; no models."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.parallel.collectives import Collectives, Gloo


def open_collectives(
    meeting: Path, rank: int, size: int, seconds: float, device: torch.device
) -> Collectives:
    """Returns a rank's collectives, not connected yet. meeting: path of the file by which the ranks
    find each other; a new one for each model. seconds: timeout for other ranks."""
    if device.type == "cpu":
        return Gloo(meeting, rank, size, seconds)
    from penstock.ranks.gpu_collectives import GpuCollectives

    return GpuCollectives(meeting, rank, size, seconds, device)
