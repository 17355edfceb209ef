"""ModelSizes: the numbers of a model that the least time of its steps depends on (engine.roofline). No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config import BLOCK_SIZE
from penstock.kernels.latent import LatentSizes

if TYPE_CHECKING:
    from penstock.models.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model whose attention layers differ in their windows alone.

    layer_weights: numbers in the matrices of a layer, the mean of all.
    kv_numbers: numbers of paged state that a token stores, all layers.
    kv_share: bytes of such a number as it is stored, over those of a number of the model's dtype.
    windows: of the layers that have one.
    recurrent: layers that attend nothing.   slot_bytes: bytes of their state, all of them, of a sequence.
    latent: what all attending layers keep in place of keys and values.
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
    recurrent: int = 0
    slot_bytes: int = 0
    latent: LatentSizes | None = None

    @classmethod
    def of(cls, model: Decoder) -> ModelSizes | None:
        """Returns a model's sizes; None where its attention differs in more, where a layer attends twice, or where
        tokens go through parts of a layer (experts)."""
        attending = [[keeper.kind for keeper in each if keeper.kind is not None] for each in model.keepers]
        kinds = [kind for each in attending for kind in each]
        numbers = [count for block in model.blocks if (count := block.numbers) is not None]
        shapes = {(kind.heads, kind.width, kind.latent) for kind in kinds}
        if len(shapes) != 1 or len(numbers) < len(model.blocks) or max(map(len, attending)) > 1:
            return None
        ((heads, width, latent),) = shapes
        up = 0 if latent is None else heads * latent.expansion * len(kinds)  # head by head, and no matrix of the blocks
        stored = sum(form.plain(model.dtype).block_bytes for form in model.paged_forms)
        return cls(
            layers=len(model.blocks),
            hidden=model.config.hidden_size,
            heads=heads,
            head_dim=width,
            vocab=model.head_rows,
            layer_weights=round((sum(numbers) + up) / len(numbers)),
            kv_numbers=stored // (BLOCK_SIZE * model.dtype.itemsize),
            kv_share=model.kv_share,
            windows=tuple(kind.window for kind in kinds if kind.window is not None),
            recurrent=attending.count([]),
            slot_bytes=model.slot_bytes,
            latent=latent,
        )
