"""Multi-head latent attention in plain torch (arXiv:2405.04434). Stores latents, and attends to
them as one KV head (absorbed form) or through keys and values made from them (expanded form). T: a
step's tokens, H: heads; rank, turning, still, value: see LatentSizes. Knows one layer's tensors; no
layer."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock.config import BLOCK_SIZE
from penstock.kernels.fp8_rows import E4M3, E4M3_MOST
from penstock.kernels.inputs import AttentionKind, StepInputs
from penstock.kernels.latent import EXPAND_TOKENS, LatentSizes
from penstock.kernels.reference.attention.attention import KindPlan, attention
from penstock.kernels.reference.attention.prefill import attend_keys
from penstock.kernels.reference.attention.rotary_and_store import rotate
from penstock.kernels.reference.elementwise.norm import rms_norm
from penstock.kernels.reference.linear.linear import linear
from penstock.kernels.state_forms import LatentKv

EXPANDED_AT_ONCE = 2**24  # the most numbers of keys and values that are expanded at once


def latent_store(
    given: Tensor,
    q: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    inputs: StepInputs,
    kv: LatentKv,
    plan: KindPlan,
    up: Tensor | None = None,
) -> None:
    """Norms and stores latents given [T, rank + turning]; rotates the last `turning` of q [T, H,
    still + turning] in place. The contract is `ops.LatentStore`."""
    rank, rotary = norm.shape[0], plan.rotary
    turning = given.shape[1] - rank
    vectors = torch.cat((rms_norm(given[:, :rank], norm, eps), given[:, rank:]), 1)
    both = torch.cat((q[..., q.shape[2] - turning :], vectors[:, None, rank:]), 1)
    rotate(both.unflatten(2, (2, turning // 2)), rotary)
    q[..., q.shape[2] - turning :] = both[:, :-1]
    vectors[:, rank:] = both[:, -1]
    if kv.scale is None or kv.beside is None:
        kv.latent.view(-1, kv.latent.shape[2])[inputs.slots] = vectors
        return
    block, offset = inputs.slots // BLOCK_SIZE, inputs.slots % BLOCK_SIZE
    eight = (
        (vectors[:, :rank].float() * kv.scale.reciprocal()).clamp_(-E4M3_MOST, E4M3_MOST).to(E4M3)
    )
    kv.latent.view(torch.uint8)[block, offset] = eight.view(torch.uint8)
    kv.beside[block, offset] = vectors[:, rank:]


def latent_attention(
    q: Tensor,
    up: Tensor,
    kv: LatentKv,
    inputs: StepInputs,
    kind: AttentionKind,
    plan: KindPlan,
    asked: None = None,
    *,
    expand_tokens: int = EXPAND_TOKENS,
) -> Tensor:
    """Attends q [T, H, still + turning] over a layer's latents; returns [T, H, value]. up: [H,
    still + value, rank]. The contract is `ops.AttentionOverLatents`. expand_tokens: least tokens of
    a step's chunks for the expanded form."""
    sizes, rows, chunks = kind.latent, inputs.rows, inputs.prefill
    assert sizes is not None, "the kind is of latent attention"
    if chunks is None or not chunks.expands(sizes, expand_tokens):
        return _absorbed(q, up, kv, inputs, kind, plan, sizes)
    out = torch.empty((*q.shape[:2], sizes.value), dtype=q.dtype, device=q.device)
    if rows:
        out[:rows] = _absorbed(q[:rows], up, kv, replace(inputs, prefill=None), kind, plan, sizes)
    start = (chunks.start + rows).tolist()
    for table, context, first, last in zip(
        chunks.block_table, chunks.context.tolist(), start, start[1:], strict=False
    ):
        if first < last:
            _expanded(
                q[first:last],
                up,
                kv,
                table[: -(-(context + last - first) // BLOCK_SIZE)],
                context,
                kind,
                sizes,
                out[first:last],
            )
    return out


def _absorbed(
    q: Tensor,
    up: Tensor,
    kv: LatentKv,
    inputs: StepInputs,
    kind: AttentionKind,
    plan: KindPlan,
    sizes: LatentSizes,
) -> Tensor:
    still = sizes.still
    asked = torch.cat((_by_head(q[..., :still], up[:, :still].mT), q[..., still:]), 2)
    return _by_head(attention(asked, kv, inputs, kind, plan), up[:, still:])


def _expanded(
    q: Tensor,
    up: Tensor,
    kv: LatentKv,
    table: Tensor,
    context: int,
    kind: AttentionKind,
    sizes: LatentSizes,
    out: Tensor,
) -> None:
    """Computes attention of a chunk's q [n, H, still + turning] in the expanded form, into out [n,
    H, value]. table: [blocks], block table of the chunk's prompt. context: position of the chunk's
    first token. As many heads are expanded at a time as fit in EXPANDED_AT_ONCE numbers."""
    vectors = kv.worth(table).flatten(0, 1).to(q.dtype)
    turned, each = vectors[:, sizes.rank :], sizes.still + sizes.value
    at_once = max(1, EXPANDED_AT_ONCE // (vectors.shape[0] * each))
    for first in range(0, kind.heads, at_once):
        some = up[first : first + at_once]
        made = linear(vectors[:, : sizes.rank].contiguous(), some.flatten(0, 1)).view(
            -1, *some.shape[:2]
        )
        keys, values = made.transpose(0, 1).split((sizes.still, sizes.value), 2)
        keys = torch.cat((keys, turned.expand(len(some), -1, -1)), 2)
        heads = slice(first, first + at_once)
        attend_keys(q[:, heads], keys, values, context, kind, out[:, heads])


def _by_head(x: Tensor, weight: Tensor) -> Tensor:
    """Multiplies each head of x [T, H, in] by its own matrix of weight [H, out, in]: [T, H,
    out]."""
    if x.device.type != "cpu":
        return torch.bmm(x.transpose(0, 1), weight.mT).transpose(0, 1)
    return torch.stack(
        [linear(x[:, head].contiguous(), matrix) for head, matrix in enumerate(weight)], 1
    )
