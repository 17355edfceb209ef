"""Rotary embedding (RoFormer, arXiv:2104.09864, halves turned together as HF does) and the KV store, out of the fused
qkv product. It knows heads, positions and slots; no layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.inputs import AttentionKind, StepInputs
from penstock.kernels.reference.norm import rms_norm


@dataclass(slots=True)
class RotaryPlan:
    """What the layers of a step share."""

    cos: Tensor  # [T, 1, D / 2] float32
    sin: Tensor  # [T, 1, D / 2] float32
    stores: Tensor  # [T * 2 * Hkv] int64: where k and v of a token and head go in KV seen as [blocks * Hkv * 2 * 16, D]
    wide: Tensor  # [T, H + Hkv, 2, D / 2] float32, a buffer
    turned: Tensor  # the same


class HasRotary(Protocol):
    """A step's plan for the layers of one kind."""

    rotary: RotaryPlan


def rotary_and_store(
    qkv: Tensor,
    cos_sin: Tensor,
    inputs: StepInputs,
    kv: Tensor,
    kind: AttentionKind,
    plan: HasRotary,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """qkv [T, (H + 2 Hkv) * D], overwritten -> q [T, H, D], normed and rotated; K and V go to `inputs.slots` of kv."""
    heads, kv_heads, width = kind.heads, kind.kv_heads, kind.width
    parts = qkv.view(qkv.shape[0], heads + 2 * kv_heads, width)
    if q_norm is not None:
        parts[:, :heads] = rms_norm(parts[:, :heads], q_norm, eps)
    if k_norm is not None:
        parts[:, heads : heads + kv_heads] = rms_norm(parts[:, heads : heads + kv_heads], k_norm, eps)
    _rotate(parts[:, : heads + kv_heads].unflatten(2, (2, width // 2)), plan.rotary)
    _store(parts[:, heads:].reshape(-1, width), kv, plan.rotary.stores)
    return parts[:, :heads]


def plan_rotary(cos_sin: Tensor, inputs: StepInputs, heads: int, kv_heads: int) -> RotaryPlan:
    """Gathers what each token turns by, and where its K and V go, once for all layers of a kind."""
    cos, sin = cos_sin.index_select(0, inputs.positions).unsqueeze(2).unbind(1)
    block, offset = inputs.slots // BLOCK_SIZE, inputs.slots % BLOCK_SIZE
    part = torch.arange(2, device=block.device)[:, None]
    head = torch.arange(kv_heads, device=block.device)
    stores = ((block[:, None, None] * kv_heads + head) * 2 + part) * BLOCK_SIZE + offset[:, None, None]
    wide = torch.empty(len(block), heads + kv_heads, 2, cos.shape[-1], device=block.device)
    return RotaryPlan(cos, sin, stores.flatten(), wide, torch.empty_like(wide))


def _rotate(x: Tensor, plan: RotaryPlan) -> None:
    """x [T, heads, 2, D / 2] in place: (a, b) -> (a cos - b sin, b cos + a sin), in float32."""
    wide, turned = plan.wide, plan.turned
    wide.copy_(x)
    torch.mul(wide, plan.cos[:, :, None], out=turned)
    turned[:, :, 0].addcmul_(wide[:, :, 1], plan.sin, value=-1)
    turned[:, :, 1].addcmul_(wide[:, :, 0], plan.sin)
    x.copy_(turned)


def _store(rows: Tensor, kv: Tensor, stores: Tensor) -> None:
    """rows [T * 2 * Hkv, D]. torch copies number by number: as 16-byte numbers it takes half the time."""
    flat = kv.view(-1, kv.shape[-1])
    if rows.shape[1] * rows.element_size() % 16 == 0 and kv.data_ptr() % 16 == 0 and kv.device.type == "cpu":
        flat, rows = flat.view(torch.complex128), rows.view(torch.complex128)
    flat[stores] = rows
