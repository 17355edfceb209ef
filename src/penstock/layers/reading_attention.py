"""ReadingAttention: attention over the keys and values that an earlier layer has stored (Gemma 4's
last layers).

It has its own queries and stores nothing; memory is counted for the layer that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.fp8_rows import Rows
from penstock.kernels.inputs import AttentionKind, StepInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.ops import Ops
from penstock.kernels.state_forms import StateForm
from penstock.layers.attention import Attention
from penstock.layers.linear import Linear
from penstock.layers.norm import Norm
from penstock.parallel.sharded_weight import Weight


@dataclass(slots=True)
class ReadingAttention:
    """Queries over another layer's keys and values; both layers have the same kind."""

    name: str  # name in a checkpoint, before `.q_proj`
    source: Attention
    query: Linear  # [heads * width, d]
    out: Linear  # [d, heads * width]
    q_norm: Norm  # [width]

    def __call__(self, ops: Ops, x: Rows, step: StepInputs, kv: LayerKv) -> Tensor:
        """Returns [T, d], or [S, d] for the tokens that the step keeps. x: [T, d]. kv: the source's
        cache."""
        kind = self.kind
        plan, norm = step.plans[kind], self.q_norm
        q = ops.rotary_and_store(
            self.query(ops, x),
            self.cos_sin,
            step,
            None,
            kind,
            plan,
            norm.weight.value,
            None,
            norm.eps,
        )
        seen = ops.attention(step.keep(q), kv, step, kind, plan, None)
        return self.out(ops, seen.reshape(-1, kind.heads * kind.width))

    @property
    def kind(self) -> AttentionKind:
        return self.source.kind

    @property
    def form(self) -> StateForm:
        return self.source.form

    @property
    def cos_sin(self) -> Tensor:
        return self.source.cos_sin

    @property
    def reader(self) -> Linear:
        return self.query

    def matrices(self) -> Iterator[Linear]:
        yield from (self.query, self.out)

    def weights(self) -> Iterator[Weight]:
        yield from self.q_norm.weights()
        for matrix in self.matrices():
            yield from matrix.weights()

    def prepare(self, ops: Ops) -> None:
        for matrix in self.matrices():
            matrix.prepare(ops)
