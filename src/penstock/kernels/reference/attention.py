"""Attention over the paged cache in plain torch: decode rows with their prefix groups (decode.py), then chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.inputs import AttentionKind, StepInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.reference.decode import DecodePlan, attend_rows, plan_decode
from penstock.kernels.reference.linear import linear
from penstock.kernels.reference.norm import rms_norm
from penstock.kernels.reference.prefill import attend_chunks
from penstock.kernels.reference.rotary import RotaryPlan, plan_rotary, rotate
from penstock.kernels.state_forms import LatentKv


@dataclass(slots=True)
class KindPlan:
    """What layers of one kind share in a step."""

    rotary: RotaryPlan
    decode: DecodePlan | None


def plan(inputs: StepInputs, kind: AttentionKind, cos_sin: Tensor, dtype: torch.dtype) -> KindPlan:
    """Works out, once for all layers of a kind, what their rows turn by, where K and V go, and the decode tiles."""
    decode = inputs.decode_for(kind.window)
    rotary = plan_rotary(cos_sin, inputs, kind.heads, kind.kv_heads)
    return KindPlan(rotary, None if decode is None or not inputs.rows else plan_decode(decode, kind))


def attention(
    q: Tensor, kv: LayerKv | LatentKv, inputs: StepInputs, kind: AttentionKind, plan: KindPlan,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q [T, H, D] over a layer's KV -> [T, H, V]. The contract is `ops.Attention`; over latent vectors
    `ops.AttentionOverLatents`."""
    out = torch.empty((*q.shape[:2], kv.values.shape[3]), dtype=q.dtype, device=q.device)
    rows = inputs.rows
    if plan.decode is not None:
        attend_rows(q[:rows], kv, plan.decode, kind, out[:rows], sinks)
    if inputs.prefill is not None:
        attend_chunks(q[rows:], kv, inputs.prefill, kind, out[rows:], sinks)
    return out


def latent_store(
    given: Tensor, q: Tensor, norm: Tensor, eps: float, inputs: StepInputs, kv: LatentKv, plan: KindPlan
) -> None:
    """given [T, rank + turning], q [T, H, still + turning], whose last `turning` are turned in place. The contract is
    `ops.LatentStore`."""
    rank, rotary = norm.shape[0], plan.rotary
    turning = given.shape[1] - rank
    vectors = torch.cat((rms_norm(given[:, :rank], norm, eps), given[:, rank:]), 1)
    both = torch.cat((q[..., q.shape[2] - turning :], vectors[:, None, rank:]), 1)
    rotate(both.unflatten(2, (2, turning // 2)), rotary)
    q[..., q.shape[2] - turning :] = both[:, :-1]
    vectors[:, rank:] = both[:, -1]
    kv.latent.view(-1, kv.latent.shape[2])[inputs.slots] = vectors


def latent_attention(q: Tensor, kv: LatentKv, inputs: StepInputs, kind: AttentionKind, plan: KindPlan) -> Tensor:
    """q [T, H, rank + turning] over a layer's vectors -> [T, H, rank]. The contract is `ops.AttentionOverLatents`."""
    return attention(q, kv, inputs, kind, plan)


def by_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H, in], weight [H, out, in] -> [T, H, out], each head by its own matrix."""
    if x.device.type != "cpu":
        return torch.bmm(x.transpose(0, 1), weight.mT).transpose(0, 1)
    return torch.stack([linear(x[:, head].contiguous(), matrix) for head, matrix in enumerate(weight)], 1)
