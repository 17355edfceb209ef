"""Extra tensors of quantized checkpoints that the engine doesn't use. These are zero points of
symmetric quantization, which must be 0, and static scales of activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.parallel.sharded_weight import FLOATS, Expected, Part, Weight


def no_zeros(parts: Sequence[Part], device: torch.device) -> Expected:
    """Returns a weight that reads zero points and raises an error unless all are 0. Some writers
    store them even for symmetric quantization. parts: the checkpoint's zero-point tensors."""
    return Expected(
        parts,
        device,
        stored=FLOATS | {"I8", "I32", "F8_E4M3"},
        optional=True,
        right=lambda zeros, _: not zeros.float().any(),
        wrong="has zero points that are not 0, and config.json says symmetric: set it to false",
    )


def read_past(parts: Sequence[Part], device: torch.device) -> dict[str, Weight]:
    """Returns weights that read a checkpoint's static activation scales and drop them. They are not
    needed: the engine computes a scale for each row of activations, which is finer, or doesn't
    quantize activations. parts: the quantized matrices."""
    names = ("input_scale", "input_zero_point", "activation_scale", "input_global_scale")
    return {
        name: Expected([Part(f"{p.name}.{name}", (1,)) for p in parts], device, optional=True)
        for name in names
    }
