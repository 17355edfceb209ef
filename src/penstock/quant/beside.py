"""Checkpoint tensors beside a matrix and its scales: zero points of symmetric numbers, scales of
activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.parallel.sharded_weight import FLOATS, Expected, Part, Weight


def no_zeros(parts: Sequence[Part], device: torch.device) -> Expected:
    """Returns a check of the zero points that some writers store for symmetric numbers: all must be
    0."""
    return Expected(
        parts,
        device,
        stored=FLOATS | {"I8", "I32", "F8_E4M3"},
        optional=True,
        right=lambda zeros, _: not zeros.float().any(),
        wrong="has zero points that are not 0, and config.json says symmetric: set it to false",
    )


def read_past(parts: Sequence[Part], device: torch.device) -> dict[str, Weight]:
    """Returns weights that skip a checkpoint's static activation scales. Here each row of
    activations gets its own scale, which is finer, or is not rounded."""
    names = ("input_scale", "input_zero_point", "activation_scale", "input_global_scale")
    return {
        name: Expected([Part(f"{p.name}.{name}", (1,)) for p in parts], device, optional=True)
        for name in names
    }
