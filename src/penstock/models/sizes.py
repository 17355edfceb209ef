"""ModelSizes: sizes of a model from which step times are estimated. engine.roofline computes the
least possible time of a step from them. No torch."""

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
    """Layers with equal attention. layers: their number. window: tokens that a query sees; None:
    all.

    numbers: multiplications of a layer per pair of a query's token and a token that it sees, over
    all heads. read: bytes that a layer reads per stored token, from its own cache or an earlier
    layer's. latent: sizes of latent attention; None: ordinary attention."""

    layers: int
    window: int | None
    numbers: int
    read: int
    latent: LatentSizes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model.

    layer_weights: parameters in the matrices of a layer that every token goes through, mean over
    layers. stored: bytes of KV cache per token, over all layers. slot_bytes: bytes of recurrent
    state per sequence, over all layers. routed: pairs of a layer's experts and the number of such
    layers. ahead: parameters of the product of per-layer embeddings, which runs before all layers.
    row_bytes: bytes of a token's row in the table of per-layer embeddings."""

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

    def ridge_rows(self, ridge: float) -> int:
        """Returns the prompt tokens that take as long to compute as a step of many rows takes to
        read its weights. ridge: for one matrix, tokens that take as long as its read."""
        dense = self.layers * self.layer_weights + self.ahead
        read = multiplied = dense
        for each, layers in self.routed:
            read += layers * each.experts * each.numbers
            multiplied += layers * each.top_k * each.numbers
        return round(ridge * (read + self.vocab * self.hidden) / multiplied)

    @property
    def windows(self) -> tuple[int, ...]:
        """Returns the window sizes of the layers in tokens, each once, ascending."""
        return tuple(sorted({each.window for each in self.attending if each.window is not None}))

    @classmethod
    def of(cls, model: Decoder) -> ModelSizes:
        """Returns a model's sizes."""
        attending = Counter[tuple[int | None, int, int, LatentSizes | None]]()
        # parameters of latent attention's `up`, which the blocks' `matrices` leave out
        made = 0
        for keeper in (keeper for block in model.blocks for keeper in block.keeps()):
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
