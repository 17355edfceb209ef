"""Lists the quantizable matrices of a model. Used by build stages that replace them. Knows layers'
names."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.layers.linear import Linear
from penstock.models.decoder import Decoder


def linears(model: Decoder) -> Iterator[Linear]:
    """Yields the layers' matrices in order. Experts and the output head are left out."""
    for block in model.blocks:
        yield from block.matrices()
