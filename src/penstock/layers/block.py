"""Block: what a decoder is a list of, a layer of any kind.

A block names its weights, its matrices and what it keeps between steps: loading, cutting,
quantizing, memory budgets and preparing are loops over what it names, and whoever adds a block to a
model changes nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from penstock.kernels.fp8_rows import Rows
from penstock.kernels.inputs import AttentionKind, StepInputs
from penstock.kernels.ops import Ops
from penstock.kernels.state_forms import RecurrentForm, StateForm
from penstock.layers.linear import Linear
from penstock.parallel.sharded_weight import Weight


class Keeper(Protocol):
    """A part of a block that keeps state of each sequence from step to step: attention, or a
    recurrent layer."""

    name: str  # in a checkpoint, before `.q_proj`
    form: StateForm  # may be another once the model is loaded and before its memory is taken

    @property
    def kind(self) -> AttentionKind | None:
        """The kind of attention that a step is planned for; None: it attends nothing."""

    @property
    def cos_sin(self) -> Tensor | None:
        """The rotary table that its kind is planned with; None where it has no kind."""

    @property
    def source(self) -> Keeper | None:
        """The keeper of an earlier layer, whose state this one reads and has none of its own. None:
        it has its own."""


class Mixer(Keeper, Protocol):
    """What brings a layer's tokens together, and keeps state for it."""

    def __call__(self, ops: Ops, x: Rows, step: StepInputs, state: Any, /) -> Tensor:
        """x [T, d], state: views of what it stores -> [T, d], of the tokens that the step keeps."""

    @property
    def reader(self) -> Linear | None:
        """The product that reads x, and says how it wants it; None: x is read by several, wide."""

    def weights(self) -> Iterator[Weight]: ...

    def matrices(self) -> Iterator[Linear]:
        """Yields its products."""

    def prepare(self, ops: Ops) -> None: ...


@dataclass(frozen=True, slots=True)
class RoutedNumbers:
    """Experts of a layer, of which a token goes through `top_k`: of so many numbers each, stored in
    so many bytes."""

    experts: int
    top_k: int
    numbers: int
    bytes: int


class Block(Protocol):
    """x [T, d], residual [T, d] (None: x opens the stream) -> the block's answer [T, d] and the
    next residual, both of the tokens that the step keeps. state: views of what each of `keeps`
    stores, as its form makes them."""

    def __call__(
        self, ops: Ops, x: Tensor, residual: Tensor | None, step: StepInputs, state: Sequence[Any]
    ) -> tuple[Tensor, Tensor | None]: ...

    def keeps(self) -> Sequence[Keeper]:
        """Returns the parts that keep state, always in the same order."""

    def matrices(self) -> Iterator[Linear]:
        """Yields the products that every token goes through: those of experts are left out."""

    def weights(self) -> Iterator[Weight]:
        """Yields every weight, always in the same order."""

    def prepare(self, ops: Ops) -> Block:
        """Arranges the loaded weights for their kernels, once -> what takes this block's place:
        itself, or a form of it that is faster with these operations."""

    @property
    def experts(self) -> RoutedNumbers | None:
        """The matrices that a token goes through some of, beside `matrices`; None:
        there are none."""


def is_recurrent(keeper: Keeper) -> bool:
    """Returns whether a keeper's state is of one size, however long the sequence is."""
    return isinstance(keeper.form, RecurrentForm)
