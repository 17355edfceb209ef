"""Rotary embedding and KV store in plain torch. They take the output of the fused qkv product
(RoFormer, arXiv:2104.09864; the two halves of a head rotate together, as in HF). T: a step's
tokens, H: query heads, Hkv: KV heads, D: numbers of a head. Knows heads, positions and slots; no
layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.fp8_rows import E4M3, E4M3_MOST
from penstock.kernels.inputs import AttentionKind, StepInputs
from penstock.kernels.layer_kv import TURNED, LayerKv, RowIndex, in_rows
from penstock.kernels.reference.elementwise.norm import rms_norm


@dataclass(slots=True)
class RotaryPlan:
    """Rotation angles and storage indices of a step's tokens, computed once for all layers of a
    kind. T: tokens, H: query heads, Hkv: KV heads, D: numbers of a head."""

    cos: Tensor  # [T, 1, D / 2] float32
    sin: Tensor  # [T, 1, D / 2] float32
    block: Tensor  # [T, 1] int64: a token's block
    offset: Tensor  # [T, 1] int64: the token's offset in the block
    wide: Tensor  # [T, H + Hkv, 2, D / 2] float32: buffer for q and k in float32
    turned: Tensor  # a second buffer like `wide`
    # [T * 2 * Hkv] int64: index of each token's and head's k and v, if plain blocks are viewed as
    # rows of D numbers
    rows: RowIndex
    # views of the buffers by number of heads: all layers take the same ones
    views: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    def buffers(self, heads: int) -> tuple[Tensor, ...]:
        """Returns the buffers for so many heads, `wide` and `turned` [T, heads, 2, D / 2], and
        their halves [T, heads, D / 2]: first and second of `wide`, then of `turned`."""
        found = self.views.get(heads)
        if found is None:
            wide, turned = self.wide[:, :heads], self.turned[:, :heads]
            found = self.views[heads] = wide, turned, *wide.unbind(2), *turned.unbind(2)
        return found


class HasRotary(Protocol):
    """A plan that has a RotaryPlan."""

    rotary: RotaryPlan


def rotary_and_store(
    qkv: Tensor,
    cos_sin: Tensor,
    inputs: StepInputs,
    kv: LayerKv | None,
    kind: AttentionKind,
    plan: HasRotary,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Norms and rotates q and k of qkv, which is overwritten; returns q [T, H, D]. With
    `kind.turned_first` rotation comes first. K and V go to `inputs.slots` of kv. The contract is
    `ops.RotaryAndStore`."""
    heads, kv_heads, width = kind.heads, kind.kv_heads if kv is not None else 0, kind.width
    parts = qkv.view(qkv.shape[0], -1, width)
    if kind.keys_as_values and kv is not None:
        parts = torch.cat((parts, parts[:, heads:]), 1)
    if kind.normed_values and kv is not None:
        values = parts[:, heads + kv_heads :]
        parts[:, heads + kv_heads :] = rms_norm(values, torch.ones(width, device=qkv.device), eps)
    if kind.turned_first:
        rotate(parts[:, : heads + kv_heads].unflatten(2, (2, width // 2)), plan.rotary)
    if q_norm is not None:
        parts[:, :heads] = rms_norm(parts[:, :heads], q_norm, eps)
    if k_norm is not None and kv is not None:
        parts[:, heads : heads + kv_heads] = rms_norm(
            parts[:, heads : heads + kv_heads], k_norm, eps
        )
    if not kind.turned_first:
        rotate(parts[:, : heads + kv_heads].unflatten(2, (2, width // 2)), plan.rotary)
    if kv is not None:
        _store(parts[:, heads:], kv, plan.rotary)
    return parts[:, :heads]


def plan_rotary(cos_sin: Tensor, inputs: StepInputs, heads: int, kv_heads: int) -> RotaryPlan:
    """Gathers each token's cosines and sines, and computes where its K and V are stored, once for
    all layers of a kind."""
    cos, sin = cos_sin.index_select(0, inputs.positions).unsqueeze(2).unbind(1)
    block, offset = inputs.slots // BLOCK_SIZE, inputs.slots % BLOCK_SIZE
    # index of each token's block and head in storage viewed as [blocks * Hkv, ...]
    cell = block[:, None] * kv_heads + torch.arange(kv_heads, device=block.device)
    wide = torch.empty(len(block), heads + kv_heads, 2, cos.shape[-1], device=block.device)
    first = cell * (2 * BLOCK_SIZE) + offset[:, None]
    rows = RowIndex(torch.stack((first, first + BLOCK_SIZE), 1).flatten())
    return RotaryPlan(cos, sin, block[:, None], offset[:, None], wide, torch.empty_like(wide), rows)


def rotate(x: Tensor, plan: RotaryPlan) -> None:
    """Rotates x [T, heads, 2, D / 2] in place: (a, b) -> (a cos - b sin, b cos + a sin), in
    float32."""
    wide, turned, first, second, turned_first, turned_second = plan.buffers(x.shape[1])
    wide.copy_(x)
    torch.mul(wide, plan.cos[:, :, None], out=turned)
    turned_first.addcmul_(second, plan.sin, value=-1)
    turned_second.addcmul_(first, plan.sin)
    x.copy_(turned)


def _store(parts: Tensor, kv: LayerKv, plan: RotaryPlan) -> None:
    """Stores parts [T, 2 * Hkv, D], k's heads followed by v's, in a layer's KV."""
    width = parts.shape[2]
    if kv.scales is None:
        rows, apart = in_rows(kv.storage.view(kv.keys.dtype), width, width)
        where = plan.rows.over_gaps(2 * BLOCK_SIZE * kv.kv_heads, apart)
        _put(parts.reshape(-1, width), rows, where)
        return
    keys, values = parts.view(-1, 2, kv.kv_heads, width).unbind(1)
    block, head, offset = plan.block, torch.arange(kv.kv_heads, device=parts.device), plan.offset
    if kv.eight == 2:
        kv.keys.view(torch.uint8)[block, head, offset] = _eight_bits(keys, kv.scales[0])
    else:
        kv.keys[block, head, offset] = keys
    turned = kv.values.view(torch.uint8)
    turned[block, head, offset // TURNED, :, offset % TURNED] = _eight_bits(values, kv.scales[1])


def _eight_bits(part: Tensor, scale: Tensor) -> Tensor:
    """Quantizes part [T, heads, D] by scale [heads] to e4m3, as bytes."""
    return (
        (part.float() * scale.reciprocal()[:, None])
        .clamp_(-E4M3_MOST, E4M3_MOST)
        .to(E4M3)
        .view(torch.uint8)
    )


def _put(rows: Tensor, stored: Tensor, where: Tensor) -> None:
    """Writes rows [n, D] to stored[where]. Both are viewed as 16-byte numbers if possible: torch
    copies number by number, so this takes half the time."""
    rows = rows.to(stored.dtype)
    if (
        rows.shape[1] * rows.element_size() % 16 == 0
        and stored.data_ptr() % 16 == 0
        and stored.device.type == "cpu"
    ):
        stored, rows = stored.view(torch.complex128), rows.view(torch.complex128)
    stored[where] = rows
