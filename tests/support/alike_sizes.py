"""Sizes of a model whose layers are all alike, in numbers of two bytes."""

from __future__ import annotations

from penstock.models.sizes import Attending, ModelSizes


def alike_sizes(
    *,
    layers: int,
    hidden: int,
    heads: int,
    head_dim: int,
    vocab: int,
    layer_weights: int,
    kv_numbers: int,
) -> ModelSizes:
    """kv_numbers: of K and V of a token, all layers."""
    each = Attending(
        layers=layers, window=None, numbers=2 * heads * head_dim, read=2 * kv_numbers // layers
    )
    return ModelSizes(
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        layer_weights=layer_weights,
        attending=(each,),
        stored=2 * kv_numbers,
    )
