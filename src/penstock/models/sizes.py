"""ModelSizes: the numbers of a model that the least time of its steps depends on (engine.roofline). No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.models.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model whose layers differ in their windows alone.

    layer_weights: numbers in the matrices of one layer.   kv_numbers: of K and V that a token stores, all layers.
    kv_share: bytes of a stored number of K and V, over those of a number of the model's dtype.
    windows: of the layers that have one.
    """

    layers: int
    hidden: int
    heads: int
    head_dim: int
    vocab: int
    layer_weights: int
    kv_numbers: int
    kv_share: float = 1.0
    windows: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: Decoder) -> ModelSizes | None:
        """Returns a model's sizes; None where layers differ in more, or tokens go through parts of them (experts)."""
        kinds = [block.attention.kind for block in model.blocks]
        alike = {(block.numbers, k.heads, k.kv_heads, k.width) for block, k in zip(model.blocks, kinds, strict=True)}
        ((numbers, heads, kv_heads, width), *others) = alike
        if others or numbers is None:
            return None
        return cls(
            layers=len(kinds),
            hidden=model.config.hidden_size,
            heads=heads,
            head_dim=width,
            vocab=model.head_rows,
            layer_weights=numbers,
            kv_numbers=2 * len(kinds) * kv_heads * width,
            kv_share=model.kv_share,
            windows=tuple(kind.window for kind in kinds if kind.window is not None),
        )
