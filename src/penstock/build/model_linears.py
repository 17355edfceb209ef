"""The matrices of a model that may be quantized, for stages that put others in their place. It
knows layers' names."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.layers.linear import Linear
from penstock.models.decoder import Decoder


def linears(model: Decoder) -> Iterator[Linear]:
    """Yields those of the layers in their order; experts and the head are left out."""
    for block in model.blocks:
        yield from block.matrices()
