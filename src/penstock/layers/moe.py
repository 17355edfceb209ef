"""Moe: a router and experts, each token through a few of them. Same manners as an Mlp.

Experts lie stacked, `[experts, out, in]`, so that one operation serves them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.fp8_rows import Rows, wide
from penstock.kernels.ops import Ops
from penstock.layers.linear import Linear
from penstock.parallel.layout import Layout
from penstock.quant.weight import Weight


@dataclass(slots=True)
class Moe:
    """Mixture of experts with top-k routing over a softmax (Mixtral, arXiv:2401.04088)."""

    router: Linear  # [experts, d]
    gate_up: Weight  # [experts, 2 * intermediate, d]: of each expert gate's rows, then up's
    down: Weight  # [experts, d, intermediate]
    top_k: int
    renormalise: bool  # whether a token's weights over its experts add up to 1
    summed: Layout | None = None  # whose ranks have a share of every expert, and add their answers

    reader: None = None  # router and experts read x

    def __call__(self, ops: Ops, x: Rows) -> Tensor:
        """x `[T, d]` -> `[T, d]`."""
        x = wide(x)
        weights, experts = ops.route(self.router(ops, x), self.top_k, self.renormalise)
        out = ops.experts(x, weights, experts, self.gate_up.value, self.down.value)
        return out if self.summed is None else self.summed.all_reduce(out)

    def weights(self) -> Iterator[Weight]:
        yield from self.router.weights()
        yield self.gate_up
        yield self.down

    def prepare(self, ops: Ops) -> None:
        self.router.prepare(ops)

    @property
    def numbers(self) -> None:
        return None
