"""What checkpoints have beside a matrix and its scales: zero points of numbers without, scales of
activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.parallel.sharded_weight import FLOATS, Expected, Part, Weight


def no_zeros(parts: Sequence[Part], device: torch.device) -> Expected:
    """Returns what stands for zero points of symmetric numbers, which some writers store and are
    nothing."""
    return Expected(
        parts,
        device,
        stored=FLOATS | {"I8", "I32", "F8_E4M3"},
        optional=True,
        right=lambda zeros, _: not zeros.float().any(),
        wrong="has zero points that are not 0, and config.json says symmetric: set it to false",
    )


def read_past(parts: Sequence[Part], device: torch.device) -> dict[str, Weight]:
    """Returns what stands for the scales of activations that were measured ahead: here each row has
    its own, which is finer, or isn't rounded."""
    names = ("input_scale", "input_zero_point", "activation_scale", "input_global_scale")
    return {
        name: Expected([Part(f"{p.name}.{name}", (1,)) for p in parts], device, optional=True)
        for name in names
    }
