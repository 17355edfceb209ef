"""ReadingAttention: attention over an earlier layer's keys and values. Gemma 4's last layers have
it.

It computes its own queries and stores nothing. Its KV cache is that of the earlier layer, so it
adds no memory."""

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
    """The layer. It has the same AttentionKind as `source`, the attention whose keys and values it
    reads. d: hidden size."""

    name: str  # prefix of its tensors' names in a checkpoint, before `.q_proj`
    source: Attention
    query: Linear  # [heads * width, d]: query projection
    out: Linear  # [d, heads * width]: output projection
    q_norm: Norm  # [width]: norm of each query head

    def __call__(self, ops: Ops, x: Rows, step: StepInputs, kv: LayerKv) -> Tensor:
        """Returns [S, d] for the S tokens of the step whose output is needed. x: [T, d], T tokens.
        kv: the cache of `source`."""
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
