"""Rotary embedding (RoFormer, arXiv:2104.09864, halves turned together as HF does) and the KV store, out of the fused
qkv product. It knows heads, positions and slots; no layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.fp8_rows import E4M3, E4M3_MOST
from penstock.kernels.inputs import AttentionKind, StepInputs
from penstock.kernels.layer_kv import LayerKv
from penstock.kernels.reference.norm import rms_norm


@dataclass(slots=True)
class RotaryPlan:
    """What the layers of a step share."""

    cos: Tensor  # [T, 1, D / 2] float32
    sin: Tensor  # [T, 1, D / 2] float32
    cell: Tensor  # [T, Hkv] int64: a token's block and head, in [blocks * Hkv]
    offset: Tensor  # [T, 1] int64: its place in the block
    wide: Tensor  # [T, H + Hkv, 2, D / 2] float32, a buffer
    turned: Tensor  # the same
    stores: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    def rows_of(self, per_cell: int, keys: int, values: int) -> Tensor:
        """[T * 2 * Hkv] int64: where k and v of a token and head go in a storage seen as rows of D numbers, of which a
        block and head has `per_cell`, its keys from row `keys` on, its values from row `values` on."""
        found = self.stores.get((per_cell, keys, values))
        if found is None:
            first = self.cell * per_cell + self.offset
            found = self.stores[per_cell, keys, values] = torch.stack((first + keys, first + values), 1).flatten()
        return found


class HasRotary(Protocol):
    """A step's plan for the layers of one kind."""

    rotary: RotaryPlan


def rotary_and_store(
    qkv: Tensor,
    cos_sin: Tensor,
    inputs: StepInputs,
    kv: LayerKv,
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
    _store(parts[:, heads:], kv, plan.rotary)
    return parts[:, :heads]


def plan_rotary(cos_sin: Tensor, inputs: StepInputs, heads: int, kv_heads: int) -> RotaryPlan:
    """Gathers what each token turns by, and where its K and V go, once for all layers of a kind."""
    cos, sin = cos_sin.index_select(0, inputs.positions).unsqueeze(2).unbind(1)
    block, offset = inputs.slots // BLOCK_SIZE, inputs.slots % BLOCK_SIZE
    cell = block[:, None] * kv_heads + torch.arange(kv_heads, device=block.device)
    wide = torch.empty(len(block), heads + kv_heads, 2, cos.shape[-1], device=block.device)
    return RotaryPlan(cos, sin, cell, offset[:, None], wide, torch.empty_like(wide))


def _rotate(x: Tensor, plan: RotaryPlan) -> None:
    """x [T, heads, 2, D / 2] in place: (a, b) -> (a cos - b sin, b cos + a sin), in float32."""
    wide, turned = plan.wide, plan.turned
    wide.copy_(x)
    torch.mul(wide, plan.cos[:, :, None], out=turned)
    turned[:, :, 0].addcmul_(wide[:, :, 1], plan.sin, value=-1)
    turned[:, :, 1].addcmul_(wide[:, :, 0], plan.sin)
    x.copy_(turned)


def _store(parts: Tensor, kv: LayerKv, plan: RotaryPlan) -> None:
    """parts [T, 2 * Hkv, D]: k's heads, then v's."""
    width = parts.shape[2]
    if kv.scales is None or kv.eight == 2:
        rows = parts if kv.scales is None else _eight_bits(parts, kv.scales.flatten())
        both = plan.rows_of(2 * BLOCK_SIZE, 0, BLOCK_SIZE)
        _put(rows.reshape(-1, width), kv.storage, kv.keys.dtype, both)
        return
    keys, values = parts.view(-1, 2, kv.kv_heads, width).unbind(1)
    values = _eight_bits(values, kv.scales[1])
    for part, like, first in ((keys, kv.keys, 0), (values, kv.values, kv.keys.itemsize * BLOCK_SIZE)):
        per_cell = BLOCK_SIZE * (kv.keys.itemsize + kv.values.itemsize) // like.itemsize
        where = plan.rows_of(per_cell, first, first).view(-1, 2, kv.kv_heads)[:, 0]
        _put(part.reshape(-1, width), kv.storage, like.dtype, where.flatten())


def _eight_bits(part: Tensor, scale: Tensor) -> Tensor:
    """part [T, heads, D], scale [heads] -> e4m3."""
    return (part.float() / scale[:, None]).clamp_(-E4M3_MOST, E4M3_MOST).to(E4M3)


def _put(rows: Tensor, storage: Tensor, dtype: torch.dtype, where: Tensor) -> None:
    """rows [n, D] into a storage seen as rows of D numbers of `dtype`. torch copies number by number: as 16-byte ones
    it takes half the time."""
    flat, rows = storage.view(dtype).view(-1, rows.shape[1]), rows.to(dtype)
    if rows.shape[1] * rows.element_size() % 16 == 0 and storage.data_ptr() % 16 == 0 and storage.device.type == "cpu":
        flat, rows = flat.view(torch.complex128), rows.view(torch.complex128)
    elif dtype == E4M3:
        flat, rows = flat.view(torch.uint8), rows.view(torch.uint8)
    flat[where] = rows
