"""Moe: a router and experts, each token through a few of them. Same manners as an Mlp.

Experts lie stacked, `[experts, out, in]`, so that one operation serves them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from penstock.kernels.expert_matrix import ExpertMatrix, Experts
from penstock.kernels.fp8_rows import Rows, wide
from penstock.kernels.ops import Ops
from penstock.layers.linear import Linear
from penstock.parallel.layout import Layout
from penstock.quant.scheme import ForExperts
from penstock.quant.weight import Weight


class ExpertWeights(Protocol):
    """One matrix [out, in] of every expert."""

    loaded: dict[str, Weight]

    def take(self) -> ExpertMatrix:
        """Returns the numbers as operations take them, and lets the loaded form go."""


@dataclass(slots=True)
class Stacked:
    """The same matrix [out, in] of every expert, one after the other."""

    loaded: dict[str, Weight]
    scheme: ForExperts
    experts: int

    def take(self) -> ExpertMatrix:
        """Returns the numbers as operations take them, and lets the loaded form go."""
        stacked = (each.view(self.experts, -1, *each.shape[1:]) for each in self.scheme.arrays(self.loaded))
        return ExpertMatrix(**dict(zip(("numbers", "scale", "zero"), stacked, strict=False)))


@dataclass(slots=True)
class Moe:
    """Mixture of experts with top-k routing over a softmax (Mixtral, arXiv:2401.04088)."""

    router: Linear  # [experts, d]
    gate_up: ExpertWeights  # [2 * intermediate, d]: an expert's gate, then its up
    down: ExpertWeights  # [d, intermediate]
    top_k: int
    renormalise: bool  # whether a token's weights over its experts add up to 1
    summed: Layout | None = None  # whose ranks have a share of every expert, and add their answers
    clamp: tuple[float, float] | None = None  # of the gate: kernels.expert_matrix.Experts
    prepared: Any = field(default=None, init=False)

    reader: None = None  # router and experts read x

    def __call__(self, ops: Ops, x: Rows) -> Tensor:
        """x `[T, d]` -> `[T, d]`."""
        x = wide(x)
        out = ops.experts(x, self.router(ops, x), self.prepared)
        return out if self.summed is None else self.summed.all_reduce(out)

    def matrices(self) -> Iterator[Linear]:
        yield from ()  # the router stays as the checkpoint has it

    def weights(self) -> Iterator[Weight]:
        yield from self.router.weights()
        yield from self.gate_up.loaded.values()
        yield from self.down.loaded.values()

    def prepare(self, ops: Ops) -> None:
        self.router.prepare(ops)
        of = Experts(self.gate_up.take(), self.down.take(), self.top_k, self.renormalise, ops.dtype, self.clamp)
        self.prepared = ops.prepare_experts(of)

    @property
    def numbers(self) -> None:
        return None
