"""OneRowLayer: a decoder layer that runs a step of one lone row in fewer launches, and any other step as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.inputs import StepInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.ops import OneRowOps, Ops
from penstock.layers.attention import Attention
from penstock.layers.block import Block
from penstock.layers.linear import Linear
from penstock.layers.mlp import Mlp
from penstock.layers.norm import Norm
from penstock.quant.weight import Weight


@dataclass(slots=True)
class OneRowLayer:
    """`layer` in the fused operations where the step has one row that stands alone."""

    layer: Block
    fused: OneRowOps
    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Mlp

    def __call__(
        self, ops: Ops, x: Tensor, residual: Tensor | None, step: StepInputs, kv: LayerKv
    ) -> tuple[Tensor, Tensor]:
        if not step.is_one_row:
            return self.layer(ops, x, residual, step, kv)
        fused, at, mlp, kind = self.fused, self.attention, self.mlp, self.attention.kind
        q, residual = fused.norm_qkv(
            x, residual, self.attention_norm.weight.value, self.attention_norm.eps, _matrix(at.qkv), _bias(at.qkv),
            at.cos_sin, step, kv, kind.heads, kind.kv_heads, kind.width,
        )  # fmt: skip
        x = fused.attention_out(q, kv, step, kind.scale, kind.window, _matrix(at.out), _bias(at.out))
        gate_up = _matrix(mlp.gate_up)
        gated, residual = fused.norm_gate(x, residual, self.mlp_norm.weight.value, self.mlp_norm.eps, gate_up)
        return mlp.down(ops, gated), residual

    def weights(self) -> Iterator[Weight]:
        return self.layer.weights()

    def prepare(self, ops: Ops) -> Block:
        return self

    @property
    def numbers(self) -> int | None:
        return self.layer.numbers


def fits_one_row(attention: Attention, mlp: Mlp) -> bool:
    """Returns whether the fused operations compute what these parts, prepared, do."""
    linears = (attention.qkv, attention.out, mlp.gate_up)
    streamed = all(linear.product is not None and linear.product.streamed is not None for linear in linears)
    whole = not any(linear.is_summed for linear in linears)
    unusual = attention.q_norm is not None or mlp.gate_up.bias is not None or attention.kind.softcap is not None
    return streamed and whole and not unusual and mlp.activation == "silu"


def _matrix(linear: Linear) -> object:
    assert linear.product is not None, "a linear is prepared before it is used"
    return linear.product.streamed


def _bias(linear: Linear) -> Tensor | None:
    return None if linear.bias is None else linear.bias.value
