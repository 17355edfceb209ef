"""DraftLayer: interface of a layer that drafts tokens from a model's hidden states. `mtp_layer.py`
and `eagle_layer.py` are two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from penstock.kernels.inputs import StepInputs
from penstock.kernels.ops import Ops
from penstock.layers.block import Keeper
from penstock.layers.embedding import Embedding
from penstock.parallel.sharded_weight import Weight


class DraftLayer(Protocol):
    """Predicts the token after the next one. T: tokens of a step, d: the model's hidden size."""

    @property
    def reads(self) -> tuple[int, ...]:
        """Layers of the model whose outputs `first` reads; (): its final hidden states, normed."""

    @property
    def of_model(self) -> bool:
        """True if its weights are in the model's checkpoint."""

    @property
    def embedding(self) -> Embedding | None:
        """The layer's own embedding of tokens; None: the model's."""

    def first(self, ops: Ops, hidden: Sequence[Tensor]) -> Tensor:
        """Returns the hidden state [T, d] from which the layer predicts first. hidden: outputs of
        the layers in `reads`, or the model's final hidden states alone, [T, d] each."""

    def __call__(
        self, ops: Ops, embeds: Tensor, hidden: Tensor, step: StepInputs, state: Sequence[Any]
    ) -> tuple[Tensor, Tensor]:
        """Returns the input of the head and the hidden state for a further prediction, both [T, d].
        embeds: [T, d] of the next tokens. hidden: [T, d], of `first` or of a prediction before.
        state: views of its stored state, updated in place."""

    def scores(self, ops: Ops, hidden: Tensor) -> Tensor | None:
        """Returns the scores of all tokens [n, vocabulary] by a head of its own; None: the model's
        head scores them. hidden: [n, d]."""

    def keeps(self) -> Sequence[Keeper]:
        """Returns the parts that keep state, always in the same order."""

    def weights(self) -> Iterator[Weight]:
        """Yields every weight, always in the same order."""

    def prepare(self, ops: Ops) -> None:
        """Arranges the loaded weights for their kernels, once."""
