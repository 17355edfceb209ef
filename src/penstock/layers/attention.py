"""Attention: one fused product in, rotary and store, attention over the paged cache, one product out.

What prefill, decode and prefix groups are lies inside `ops.attention`; this layer says which kind of attention it is,
and finds what was planned for that kind in the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.fp8_rows import Rows
from penstock.kernels.inputs import AttentionKind, StepInputs
from penstock.kernels.layer_kv import KvForm, LayerKv
from penstock.kernels.ops import Ops
from penstock.layers.linear import Linear
from penstock.layers.norm import Norm
from penstock.quant.weight import Weight


@dataclass(slots=True)
class Attention:
    """Grouped-query attention (arXiv:2305.13245) with rotary positions. `kv_form` may be another once the model is
    loaded and before its KV is made."""

    name: str  # in a checkpoint, before `.q_proj`
    kind: AttentionKind
    kv_form: KvForm
    cos_sin: Tensor  # [positions, 2, width / 2] float32, shared with other layers
    qkv: Linear  # [(heads + 2 kv_heads) * width, d]: q's rows, then k's, then v's
    out: Linear  # [d, heads * width]
    q_norm: Norm | None = None  # [width]: q and k are normed head by head before they are rotated
    k_norm: Norm | None = None

    def __call__(self, ops: Ops, x: Rows, step: StepInputs, kv: LayerKv) -> Tensor:
        """x `[T, d]`, kv of `kv_form` -> `[T, d]`."""
        kind = self.kind
        plan = step.plans[kind]
        q_norm = None if self.q_norm is None else self.q_norm.weight.value
        k_norm = None if self.k_norm is None else self.k_norm.weight.value
        eps = 0.0 if self.q_norm is None else self.q_norm.eps
        q = ops.rotary_and_store(self.qkv(ops, x), self.cos_sin, step, kv, kind, plan, q_norm, k_norm, eps)
        seen = ops.attention(q, kv, step, kind, plan)
        return self.out(ops, seen.reshape(-1, kind.heads * kind.width))

    def weights(self) -> Iterator[Weight]:
        yield from (norm.weight for norm in (self.q_norm, self.k_norm) if norm is not None)
        yield from self.qkv.weights()
        yield from self.out.weights()

    def prepare(self, ops: Ops) -> None:
        self.qkv.prepare(ops)
        self.out.prepare(ops)
