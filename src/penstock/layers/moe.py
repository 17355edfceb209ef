"""Moe: a mixture of experts, used like an Mlp. A router chooses a few experts for each token; a
shared expert may process every token.

Experts are stacked, [experts, out, in], so that one operation computes all of them. T: tokens of a
step, d: hidden size, intermediate: inner size of an expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from penstock.kernels.expert_matrix import ExpertMatrix, Experts, Gate, SharedOutput
from penstock.kernels.fp8_rows import Rows, wide
from penstock.kernels.ops import Ops
from penstock.kernels.routing import Routing
from penstock.layers.block import RoutedNumbers
from penstock.layers.linear import Linear
from penstock.layers.mlp import Mlp, Relu2Mlp
from penstock.parallel.layout import Layout
from penstock.parallel.sharded_weight import Weight
from penstock.quant.scheme import ForExperts


class ExpertWeights(Protocol):
    """The matrices [out, in] of all experts, one each."""

    loaded: dict[str, Weight]

    def take(self) -> ExpertMatrix:
        """Returns the matrices in the layout of the expert operations. The loaded arrays are
        dropped."""


@dataclass(slots=True)
class Stacked:
    """One matrix [out, in] of every expert, loaded expert by expert."""

    loaded: dict[str, Weight]
    scheme: ForExperts
    experts: int

    def take(self) -> ExpertMatrix:
        """Returns the matrices in the layout of the expert operations. The loaded arrays are
        dropped."""
        names = ("numbers", "scale", "zero", "whole")
        return ExpertMatrix(
            **{
                name: each.view(self.experts, -1, *each.shape[1:])
                for name, each in zip(names, self.scheme.arrays(self.loaded), strict=False)
                if each is not None
            }
        )


@dataclass(slots=True)
class SharedExpert:
    """An MLP that every token goes through beside its experts (DeepSeekMoE, arXiv:2401.06066). With
    a gate, its output is multiplied by the gate's sigmoid (Qwen2-MoE)."""

    mlp: Mlp | Relu2Mlp  # gives this rank's part of a sum, if there are several ranks
    # [1, d]: its product with x, through a sigmoid, multiplies the output
    gate: Weight | None = None
    scale: float = 1.0  # factor of the shared expert's output

    def output(self, made: Callable[[], Tensor]) -> SharedOutput:
        """Returns what is added to the experts' output. made: function that returns the MLP's."""
        return SharedOutput(made, None if self.gate is None else self.gate.value, self.scale)

    def weights(self) -> Iterator[Weight]:
        yield from self.mlp.weights()
        if self.gate is not None:
            yield self.gate

    def prepare(self, ops: Ops) -> None:
        self.mlp.prepare(ops)


@dataclass(slots=True)
class Moe:
    """Mixture of experts with top-k routing (Mixtral, arXiv:2401.04088). d: hidden size,
    intermediate: inner size of an expert."""

    router: Linear  # [experts, d]: scores the experts for each token
    # [2 * intermediate, d]: gate, then up, of each expert; without a gate [intermediate, d]
    gate_up: ExpertWeights
    down: ExpertWeights  # [d, intermediate] of each expert
    routing: Routing
    # the ranks, if each holds a share of every expert and they add their results; None: one rank
    summed: Layout | None = None
    # bounds of the activation, see kernels.expert_matrix.Experts
    clamp: tuple[float, float] | None = None
    # [experts] float32: added to scores for the choice (kernels.expert_matrix.Experts)
    correction: Weight | None = None
    shared: SharedExpert | None = None
    score_cap: float | None = None  # scores become cap * tanh(scores / cap) before routing
    gate: Gate = "silu"
    # [experts] float32: factor of each expert's weight (kernels.expert_matrix.Experts)
    answer_scale: Weight | None = None
    latent: tuple[Linear, Linear] | None = (
        # products before and after the experts, if their input is narrower than d (Nemotron 3
        # Super)
        None
    )
    prepared: Any = field(default=None, init=False)

    reader: None = None  # None: router and experts read x, so no single product does

    def __call__(self, ops: Ops, x: Rows) -> Tensor:
        """Returns the output [T, d] for T tokens x [T, d]."""
        x = wide(x)
        if (shared := self.shared) is None:
            return self.answer(ops, x, self.router(ops, x))
        out, _ = ops.concurrent(
            lambda met: self._routed(ops, x, self.router(ops, x), shared.output(met)),
            lambda: shared.mlp(ops, x),
        )
        return self._sum(out)

    def answer(self, ops: Ops, x: Tensor, scores: Tensor) -> Tensor:
        """Returns the experts' output [T, d] for x [T, d]. scores: the router's scores [T,
        experts], which may be computed from another input than x."""
        return self._sum(self._routed(ops, x, scores))

    def _routed(
        self, ops: Ops, x: Tensor, scores: Tensor, shared: SharedOutput | None = None
    ) -> Tensor:
        """Returns `answer`, or this rank's part of it, plus the output of a shared expert."""
        if self.score_cap is not None:
            scores = ops.softcap(scores, self.score_cap)
        if self.latent is None:
            return ops.experts(x, scores, self.prepared, shared)
        # each rank may map its own part of the sum, since the map is linear
        narrower, wider = self.latent
        out = wider(ops, ops.experts(narrower(ops, x), scores, self.prepared, None))
        if shared is None:
            return out
        return ops.add_opened(out, shared.made(), x, shared.gate, shared.scale)

    def _sum(self, part: Tensor) -> Tensor:
        """Returns the sum over ranks of their parts [T, d]."""
        return part if self.summed is None else self.summed.all_reduce(part)

    def matrices(self) -> Iterator[Linear]:
        # the router is left out, since it is never quantized
        yield from self.latent or ()
        if self.shared is not None:
            yield from self.shared.mlp.matrices()

    def weights(self) -> Iterator[Weight]:
        yield from self.router.weights()
        if self.correction is not None:
            yield self.correction
        if self.answer_scale is not None:
            yield self.answer_scale
        yield from self.gate_up.loaded.values()
        yield from self.down.loaded.values()
        for matrix in self.latent or ():
            yield from matrix.weights()
        if self.shared is not None:
            yield from self.shared.weights()

    def prepare(self, ops: Ops) -> None:
        for matrix in (self.router, *(self.latent or ())):
            matrix.prepare(ops)
        if self.shared is not None:
            self.shared.prepare(ops)
        correction = None if self.correction is None else self.correction.value
        both = self.gate_up.take(), self.down.take()
        scale = None if self.answer_scale is None else self.answer_scale.value
        of = Experts(*both, self.routing, ops.dtype, self.clamp, correction, self.gate, scale)
        self.prepared = ops.prepare_experts(of)

    @property
    def experts(self) -> RoutedNumbers:
        count = self.router.loaded["weight"].shape[0]
        stacked = (*self.gate_up.loaded.values(), *self.down.loaded.values())
        numbers, stored = (
            sum(weight.numbers for weight in stacked),
            sum(weight.nbytes for weight in stacked),
        )
        return RoutedNumbers(count, self.routing.top_k, numbers // count, stored // count)
