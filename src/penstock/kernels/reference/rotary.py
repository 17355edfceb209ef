"""Rotary embedding and the KV store, out of the fused qkv product."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.inputs import AttentionInputs
from penstock.kernels.reference.norm import rms_norm


def rotary_and_store(
    qkv: Tensor,
    cos_sin: Tensor,
    inputs: AttentionInputs,
    kv: Tensor,
    heads: int,
    kv_heads: int,
    width: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """qkv [T, (H + 2 Hkv) * D] -> q [T, H, D], normed and rotated; K and V go to `inputs.slots` of kv."""
    parts = qkv.view(qkv.shape[0], heads + 2 * kv_heads, width)
    q, k, v = parts.split([heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    cos, sin = cos_sin[inputs.positions].unsqueeze(2).unbind(1)  # [T, 1, D / 2] each
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    block, offset = inputs.slots // 16, inputs.slots % 16
    kv[block, :, 0, offset] = k
    kv[block, :, 1, offset] = v
    return q


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
