"""OneRowLayer: a decoder layer with fewer launches for single-row steps. A row is one sequence of a
batch. Steps with more rows run the plain layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.kernels.inputs import StepInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.ops import OneRowOps, Ops
from penstock.layers.attention import Attention
from penstock.layers.block import Block, Keeper, RoutedNumbers
from penstock.layers.linear import Linear
from penstock.layers.mlp import Mlp
from penstock.layers.norm import Norm
from penstock.parallel.sharded_weight import Weight


@dataclass(slots=True)
class OneRowLayer:
    """A layer that uses fused operations if the step is one row without a prefix group."""

    layer: Block
    fused: OneRowOps
    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Mlp
    has_plain_qkv: bool

    def __call__(
        self,
        ops: Ops,
        x: Tensor,
        residual: Tensor | None,
        step: StepInputs,
        state: Sequence[LayerKv],
    ) -> tuple[Tensor, Tensor | None]:
        if not step.is_one_row:
            return self.layer(ops, x, residual, step, state)
        (kv,) = state
        fused, at, mlp, kind = self.fused, self.attention, self.mlp, self.attention.kind
        if self.has_plain_qkv and kv.scales is None:
            q, residual = fused.norm_qkv(
                x,
                residual,
                self.attention_norm.weight.value,
                self.attention_norm.eps,
                _matrix(at.qkv),
                _bias(at.qkv),
                at.cos_sin,
                step,
                kv,
                kind.heads,
                kind.kv_heads,
                kind.width,
            )
            x = at.out(
                ops, ops.attention(q, kv, step, kind, step.plans[kind], at.sink_scores).view(1, -1)
            )
        else:
            # two launches are faster: 14 us for an int8 8B model, against 20 us for one fused
            # launch
            rows, residual = self.attention_norm(ops, x, residual, at.reader)
            if at.is_rotation_alone:
                qkv, form = at.qkv(ops, rows), at.out.form(1)
                x = at.out(
                    ops,
                    fused.rotate_and_attend(qkv, at.cos_sin, kv, step, kind, at.sink_scores, form),
                )
            else:
                x = at(ops, rows, step, kv)
        norm, gate_up = self.mlp_norm, _matrix(mlp.gate_up)
        gated, residual = fused.norm_gate(
            x, residual, norm.weight.value, norm.eps, gate_up, mlp.down.form(1)
        )
        return mlp.down(ops, gated), residual

    def keeps(self) -> Sequence[Keeper]:
        return self.layer.keeps()

    def matrices(self) -> Iterator[Linear]:
        return self.layer.matrices()

    def weights(self) -> Iterator[Weight]:
        return self.layer.weights()

    def prepare(self, ops: Ops) -> Block:
        return self

    @property
    def experts(self) -> RoutedNumbers | None:
        return self.layer.experts


def fits_gate(mlp: Mlp) -> bool:
    """Returns True if `OneRowOps.norm_gate` computes the same as the norm and this prepared MLP's
    gate and up."""
    return _streams(mlp.gate_up) and mlp.gate_up.bias is None and mlp.activation == "silu"


def fits_qkv(attention: Attention) -> bool:
    """Returns True if `OneRowOps.norm_qkv` computes the same as the norm and this prepared
    attention's product, rotation and store. It supports unquantized caches only."""
    return (
        _streams(attention.qkv)
        and _matrix(attention.qkv).scale is None
        and attention.is_rotation_alone
    )


def _streams(linear: Linear) -> bool:
    return (
        linear.product is not None and linear.product.streamed is not None and not linear.is_summed
    )


def _matrix(linear: Linear) -> Any:
    assert linear.product is not None, "a linear is prepared before it is used"
    return linear.product.streamed


def _bias(linear: Linear) -> Tensor | None:
    return None if linear.bias is None else linear.bias.value
