"""Block: the interface of a decoder's layers, of any kind.

A block names its weights, its matrices and the state that it keeps between steps. Loading, cutting,
quantizing, memory budgets and preparing are loops over these names, so a new kind of block needs no
change elsewhere."""

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
    """A part of a block with state for each sequence that is kept between steps: attention (its KV
    cache) or a recurrent layer."""

    name: str  # prefix of its tensors' names in a checkpoint, such as the part before `.q_proj`
    # layout of the stored state; may be replaced between loading and the allocation of the cache
    form: StateForm

    @property
    def kind(self) -> AttentionKind | None:
        """Kind of attention, by which a step's plan is found; None: the part is not attention."""

    @property
    def cos_sin(self) -> Tensor | None:
        """Rotary table, needed to plan a step for `kind`; None if `kind` is None."""

    @property
    def source(self) -> Keeper | None:
        """Keeper of an earlier layer whose state this one reads instead of its own; None: it has
        its own state."""


class Mixer(Keeper, Protocol):
    """A Keeper that mixes the tokens of a sequence (attention, a convolution, a recurrence)."""

    def __call__(self, ops: Ops, x: Rows, step: StepInputs, state: Any, /) -> Tensor:
        """Returns [S, d] for the S tokens of the step whose output is needed. x: [T, d], T tokens
        of hidden size d. state: views of the stored state, updated in place."""

    @property
    def reader(self) -> Linear | None:
        """The one product that reads x; x is quantized as that product needs it. None: several
        products read x, which is not quantized."""

    def weights(self) -> Iterator[Weight]: ...

    def matrices(self) -> Iterator[Linear]:
        """Yields the mixer's weight matrices."""

    def prepare(self, ops: Ops) -> None: ...


@dataclass(frozen=True, slots=True)
class RoutedNumbers:
    """Sizes of a layer's experts. A token goes through `top_k` of `experts`; each has `numbers`
    parameters and takes this many bytes."""

    experts: int
    top_k: int
    numbers: int
    bytes: int


class Block(Protocol):
    """A layer of a decoder. A call takes x [T, d] and the residual stream [T, d] (None: x starts
    the stream), for T tokens of hidden size d. It returns the block's output and the new residual
    stream, both [S, d], for the S tokens whose output is needed. state: views of the stored state,
    one for each part in `keeps`."""

    def __call__(
        self, ops: Ops, x: Tensor, residual: Tensor | None, step: StepInputs, state: Sequence[Any]
    ) -> tuple[Tensor, Tensor | None]: ...

    def keeps(self) -> Sequence[Keeper]:
        """Returns the parts that keep state, always in the same order."""

    def matrices(self) -> Iterator[Linear]:
        """Yields the products that every token goes through. Experts are left out."""

    def weights(self) -> Iterator[Weight]:
        """Yields every weight, always in the same order."""

    def prepare(self, ops: Ops) -> Block:
        """Arranges the loaded weights for their kernels, once. Returns the block to use from now
        on: itself, or a faster block that `ops` allows."""

    @property
    def experts(self) -> RoutedNumbers | None:
        """Sizes of the experts, which are not in `matrices`; None: no experts."""


def is_recurrent(keeper: Keeper) -> bool:
    """Returns True if a keeper's state has the same size for any length of the sequence."""
    return isinstance(keeper.form, RecurrentForm)
