"""ModelSizes: the numbers of a model that determine the minimal time of its steps
(engine.roofline). No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config import BLOCK_SIZE
from penstock.kernels.latent import LatentSizes

if TYPE_CHECKING:
    from penstock.layers.block import RoutedNumbers
    from penstock.models.decoder import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Attending:
    """A group of layers with equal attention. window: None: all tokens.

    numbers: per token of queries and outputs, over all heads of a layer: multiplications per pair
    of tokens. read: bytes that a layer reads per stored token, its own or an earlier layer's.
    latent: sizes for attention over latents, from which keys and values may be made; None: plain
    attention."""

    layers: int
    window: int | None
    numbers: int
    read: int
    latent: LatentSizes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model.

    layer_weights: numbers in the matrices of a layer that every token goes through, the mean over
    layers. stored: bytes of paged state per token, all layers. slot_bytes: bytes of recurrent state
    per sequence, all layers. routed: experts of a layer, and the number of such layers. ahead:
    numbers in the matrix before all layers (per-layer embeddings). row_bytes: bytes of a token's
    row of the table beside it."""

    layers: int
    hidden: int
    vocab: int
    layer_weights: int
    attending: tuple[Attending, ...]
    stored: int
    slot_bytes: int = 0
    routed: tuple[tuple[RoutedNumbers, int], ...] = ()
    ahead: int = 0
    row_bytes: int = 0

    @property
    def windows(self) -> tuple[int, ...]:
        """Distinct window sizes in use."""
        return tuple(sorted({each.window for each in self.attending if each.window is not None}))

    @classmethod
    def of(cls, model: Decoder) -> ModelSizes:
        """Returns a model's sizes."""
        attending = Counter[tuple[int | None, int, int, LatentSizes | None]]()
        # numbers of latent attention's `up`, applied head by head and not in the blocks' `matrices`
        made = 0
        for keeper in (keeper for each in model.keepers for keeper in each):
            if (kind := keeper.kind) is not None:
                form = (keeper.source or keeper).form
                assert not hasattr(form, "slot_bytes"), "what attends is stored by the token"
                answered = kind.width if kind.value_width is None else kind.value_width
                numbers = kind.heads * (kind.width + answered)
                attending[kind.window, numbers, form.block_bytes // BLOCK_SIZE, kind.latent] += 1
                made += 0 if kind.latent is None else kind.heads * kind.latent.expansion
        matrices = sum(matrix.numbers for block in model.blocks for matrix in block.matrices())
        inputs = model.layer_inputs
        return cls(
            layers=len(model.blocks),
            hidden=model.config.hidden_size,
            vocab=model.head_rows,
            layer_weights=round((matrices + made) / len(model.blocks)),
            attending=tuple(
                Attending(layers=count, window=window, numbers=numbers, read=read, latent=latent)
                for (window, numbers, read, latent), count in attending.items()
            ),
            stored=sum(form.block_bytes for form in model.paged_forms) // BLOCK_SIZE,
            slot_bytes=model.slot_bytes,
            routed=tuple(
                Counter(
                    each for block in model.blocks if (each := block.experts) is not None
                ).items()
            ),
            ahead=0 if inputs is None else inputs.product.numbers,
            row_bytes=0 if inputs is None else model.table_bytes // inputs.table.table.shape[0],
        )
