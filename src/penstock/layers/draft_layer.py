"""DraftLayer: interface of what drafts tokens from a model's hidden states. A ChainLayer
(`mtp_layer.py`, `eagle_layer.py`) runs once a draft, a BlockLayer (`dflash_layer.py`) once for all.
"""

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
    """Predicts tokens after the next one. T: tokens of a step, d: the model's hidden size."""

    @property
    def reads(self) -> tuple[int, ...]:
        """Layers of the model whose outputs `first` reads; (): its final hidden states, normed."""

    @property
    def of_model(self) -> bool:
        """True if its weights are in the model's checkpoint, and it reads embeddings as the model
        does. Others read the rows of the table."""

    @property
    def has_head(self) -> bool:
        """True if it has a head of its own; else the model's scores its tokens."""

    @property
    def embedding(self) -> Embedding | None:
        """The layer's own embedding of tokens; None: the model's."""

    def first(self, ops: Ops, hidden: Sequence[Tensor]) -> Tensor:
        """Returns the hidden state [T, d] from which the layer predicts first. hidden: outputs of
        the layers in `reads`, or the model's final hidden states alone, [T, d] each."""

    def scores(self, ops: Ops, hidden: Tensor) -> Tensor | None:
        """Returns the scores of all tokens [n, vocabulary] by a head of its own; None: the model's
        head scores them. hidden: [n, d]."""

    def keeps(self) -> Sequence[Keeper]:
        """Returns the parts that keep state, always in the same order."""

    def weights(self) -> Iterator[Weight]:
        """Yields every weight, always in the same order."""

    def prepare(self, ops: Ops) -> None:
        """Arranges the loaded weights for their kernels, once."""


class ChainLayer(DraftLayer, Protocol):
    """Predicts one token, and from its own output the next."""

    def __call__(
        self, ops: Ops, embeds: Tensor, hidden: Tensor, step: StepInputs, state: Sequence[Any]
    ) -> tuple[Tensor, Tensor]:
        """Returns the input of the head and the hidden state for a further prediction, both [T, d].
        embeds: [T, d] of the next tokens. hidden: [T, d], of `first` or of a prediction before.
        state: views of its stored state, updated in place."""


class BlockLayer(DraftLayer, Protocol):
    """Predicts all tokens of a draft at once, each at its own place: the draft's tokens are the
    newest token and masks, which see the tokens before them and each other."""

    @property
    def mask(self) -> int:
        """Id of the token that stands for one to be predicted."""

    def store(self, ops: Ops, hidden: Tensor, step: StepInputs, state: Sequence[Any]) -> None:
        """Stores K and V of the step's tokens. hidden: [T, d], of `first`. state: views of its
        stored state, updated in place."""

    def __call__(self, ops: Ops, embeds: Tensor, step: StepInputs, state: Sequence[Any]) -> Tensor:
        """Returns the input of the head, [T, d], whose scores at a mask are of the token in its
        place. embeds: [T, d] of the drafts' tokens. state: as in `store`."""
