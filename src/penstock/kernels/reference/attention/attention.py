"""Attention over the paged cache in plain torch. Decode queries with their prefix groups are in
decode.py, chunks of prompts in prefill.py. T: a step's tokens, H: query heads, D: numbers of a
head, V: numbers of a value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.inputs import AttentionKind, StepInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.reference.attention.decode import DecodePlan, attend_rows, plan_decode
from penstock.kernels.reference.attention.prefill import attend_chunks
from penstock.kernels.reference.attention.rotary_and_store import RotaryPlan, plan_rotary
from penstock.kernels.state_forms import LatentKv


@dataclass(slots=True)
class KindPlan:
    """Plan of a step for all layers of one kind: data that these layers share."""

    rotary: RotaryPlan
    decode: DecodePlan | None


def plan(inputs: StepInputs, kind: AttentionKind, cos_sin: Tensor, dtype: torch.dtype) -> KindPlan:
    """Plans a step for all layers of a kind: gathers rotation angles, computes where K and V are
    stored, and divides decode queries into tiles."""
    decode = inputs.decode_for(kind.window)
    rotary = plan_rotary(cos_sin, inputs, kind.heads, kind.kv_heads)
    return KindPlan(
        rotary, None if decode is None or not inputs.rows else plan_decode(decode, kind)
    )


def attention(
    q: Tensor,
    kv: LayerKv | LatentKv,
    inputs: StepInputs,
    kind: AttentionKind,
    plan: KindPlan,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attends q [T, H, D] over a layer's KV; returns [T, H, V]. The contract is `ops.Attention`,
    for latents `ops.AttentionOverLatents`."""
    out = torch.empty(
        (*q.shape[:2], kind.value_width or q.shape[2]), dtype=q.dtype, device=q.device
    )
    rows = inputs.rows
    if plan.decode is not None:
        attend_rows(q[:rows], kv, plan.decode, kind, out[:rows], sinks)
    if inputs.prefill is not None:
        attend_chunks(q[rows:], kv, inputs.prefill, kind, out[rows:], sinks)
    return out
