"""Block: one element of a decoder's list of layers, of any kind.

A block names its weights, its matrices and the state that it keeps between steps. Loading, cutting,
quantizing, memory budgets and preparing are loops over these names, so a new kind of block changes
nothing else."""

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

    name: str  # name in a checkpoint, before `.q_proj`
    form: StateForm  # may be replaced after the model is loaded, before the cache is allocated

    @property
    def kind(self) -> AttentionKind | None:
        """The kind of attention for which steps are planned; None: the layer has no attention."""

    @property
    def cos_sin(self) -> Tensor | None:
        """The rotary table for planning its kind; None without a kind."""

    @property
    def source(self) -> Keeper | None:
        """The keeper of an earlier layer whose state this one reads; None: it has its own state."""


class Mixer(Keeper, Protocol):
    """A part that mixes the tokens of a sequence, and keeps state for that."""

    def __call__(self, ops: Ops, x: Rows, step: StepInputs, state: Any, /) -> Tensor:
        """Returns [T, d] for the tokens that the step keeps. x: [T, d]. state: views of the stored
        state."""

    @property
    def reader(self) -> Linear | None:
        """The product that reads x and decides the form of its rows; None: several read x,
        unquantized."""

    def weights(self) -> Iterator[Weight]: ...

    def matrices(self) -> Iterator[Linear]:
        """Yields the mixer's products."""

    def prepare(self, ops: Ops) -> None: ...


@dataclass(frozen=True, slots=True)
class RoutedNumbers:
    """Sizes of a layer's experts: a token goes through `top_k` of `experts`, each with this many
    numbers and stored bytes."""

    experts: int
    top_k: int
    numbers: int
    bytes: int


class Block(Protocol):
    """Takes x [T, d] and the residual [T, d] (None: x is the first) -> the block's output [T, d]
    and the next residual, both for the tokens that the step keeps. state: for each of `keeps`,
    views of its state in the layout of its form."""

    def __call__(
        self, ops: Ops, x: Tensor, residual: Tensor | None, step: StepInputs, state: Sequence[Any]
    ) -> tuple[Tensor, Tensor | None]: ...

    def keeps(self) -> Sequence[Keeper]:
        """Returns the parts that keep state, always in the same order."""

    def matrices(self) -> Iterator[Linear]:
        """Yields the products that every token goes through, without experts."""

    def weights(self) -> Iterator[Weight]:
        """Yields every weight, always in the same order."""

    def prepare(self, ops: Ops) -> Block:
        """Arranges the loaded weights for their kernels, once. Returns the block to use from now
        on: itself, or a faster form with these operations."""

    @property
    def experts(self) -> RoutedNumbers | None:
        """Sizes of the experts, which `matrices` leaves out; None: no experts."""


def is_recurrent(keeper: Keeper) -> bool:
    """Returns True if a keeper's state has the same size for any length of the sequence."""
    return isinstance(keeper.form, RecurrentForm)
