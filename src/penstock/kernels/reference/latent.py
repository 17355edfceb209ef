"""Latent vectors in plain torch (arXiv:2405.04434): what is stored of a token, and the attention that reads it: that of
one KV head. It knows one layer's tensors; no layer."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.inputs import AttentionKind, StepInputs
from penstock.kernels.reference.attention import KindPlan, attention
from penstock.kernels.reference.linear import linear
from penstock.kernels.reference.norm import rms_norm
from penstock.kernels.reference.rotary import rotate
from penstock.kernels.state_forms import LatentKv


def latent_store(
    given: Tensor,
    q: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    inputs: StepInputs,
    kv: LatentKv,
    plan: KindPlan,
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
