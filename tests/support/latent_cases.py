"""Steps over latent vectors, and what fp64 gives token by token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from attention_cases import of_columns, on
from kernels_naive import Case
from torch import Tensor

from penstock.kernels.fp8_rows import E4M3
from penstock.kernels.inputs import AttentionKind
from penstock.kernels.latent import LatentSizes
from penstock.kernels.reference.attention import attention as plain_attention
from penstock.kernels.reference.attention import latent as plain
from penstock.kernels.state_forms import LatentForm, LatentKv
from penstock.kernels.triton.attention import attention as triton
from penstock.kernels.triton.attention.latent import latent_attention
from penstock.kernels.triton.attention.latent_store import latent_store


@dataclass
class LatentCase:
    """A step with queries of latent attention, what makes keys and values,
    and a layer's vectors."""

    case: Case
    up: Tensor
    kv: LatentKv
    kind: AttentionKind


def of_latents(
    case: Case, sizes: LatentSizes, dtype: torch.dtype = torch.float32, eight: bool = False
) -> LatentCase:
    """The same step over vectors, plain or in eight bits. Scores are spread by about 3 at any
    width."""
    draw = torch.Generator().manual_seed(3)
    tokens, heads, _ = case.q.shape
    form = LatentForm(sizes.width, sizes.rank, dtype, torch.tensor([0.125]) if eight else None)
    kv = form.over(torch.zeros(case.kv.shape[0], *form.block_shape, dtype=torch.uint8))
    drawn = torch.randn(case.kv.shape[0], 16, sizes.width, generator=draw)
    kv.turned.copy_(drawn[..., sizes.rank :])
    if kv.scale is None:
        kv.vectors.copy_(drawn[..., : sizes.rank])
    else:
        kv.latent.view(torch.uint8).copy_(
            (drawn[..., : sizes.rank] / kv.scale).to(E4M3).view(torch.uint8)
        )
    q = torch.randn(tokens, heads, sizes.head, generator=draw).to(dtype)
    up = (
        torch.randn(heads, sizes.still + sizes.value, sizes.rank, generator=draw)
        .mul_(sizes.rank**-0.5)
        .to(dtype)
    )
    kind = AttentionKind(
        heads=heads,
        kv_heads=1,
        width=sizes.width,
        rope=0,
        window=None,
        scale=3 * sizes.head**-0.5,
        value_width=sizes.rank,
        latent=sizes,
    )
    return LatentCase(replace(case, q=q), up, kv, kind)


def kv_on(kv: LatentKv, device: str) -> LatentKv:
    """The vectors on a device."""
    beside, scale = (None if part is None else part.to(device) for part in (kv.beside, kv.scale))
    return replace(kv, latent=kv.latent.to(device), beside=beside, scale=scale)


def right(step: LatentCase, tokens: Iterable[int] | None = None, device: str = "cpu") -> Tensor:
    """The answers of some tokens, or all, in fp64, by keys and values of each head. device: that
    works them out."""
    case, sizes, found, up = step.case, step.kind.latent, [], step.up.to(device).double()
    assert sizes is not None
    for token in range(len(case.positions)) if tokens is None else tokens:
        seen = torch.arange(case.positions[token] + 1)
        vectors = step.kv.worth(case.tables[token]).flatten(0, 1)[seen].to(device).double()
        made = torch.einsum("hdr,tr->htd", up, vectors[:, : sizes.rank])
        turned = vectors[None, :, sizes.rank :].expand(len(up), -1, -1)
        keys, values = torch.cat((made[..., : sizes.still], turned), 2), made[..., sizes.still :]
        scores = (
            torch.einsum("hd,htd->ht", case.q[token].to(device).double(), keys) * step.kind.scale
        )
        found.append(torch.einsum("ht,htd->hd", torch.softmax(scores, -1), values))
    return torch.stack(found).cpu()


def stored_and_seen(step: LatentCase, device: str) -> tuple[Tensor, Tensor]:
    """Stores the newest token of each row of a step without chunks and attends, by Triton's
    kernels: what heads see, and what they should by fp64 after plain torch has stored."""
    step.case, sizes, draw = (
        of_columns(step.case),
        step.kind.latent,
        torch.Generator().manual_seed(5),
    )
    assert sizes is not None
    inputs, q = step.case.inputs, step.case.q
    angles = torch.rand(2048, sizes.turning // 2, generator=draw) * 6
    cos_sin = torch.stack((angles.cos(), angles.sin()), 1)
    given = torch.randn(len(q), sizes.width, generator=draw).to(q.dtype)
    norm = (torch.rand(sizes.rank, generator=draw) + 0.5).to(q.dtype)
    kv, there = kv_on(step.kv, device), on(step.case, device).inputs
    kv.latent, kv.beside = kv.latent.clone(), None if kv.beside is None else kv.beside.clone()
    up, its_q, planned = (
        step.up.to(device),
        q.to(device, copy=True),
        triton.plan(there, step.kind, cos_sin.to(device), q.dtype),
    )
    asked = latent_store(
        given.to(device), its_q, norm.to(device), 1e-6, cos_sin.to(device), there, kv, planned, up
    )
    assert asked is not None, "so few tokens are multiplied as they are stored"
    seen = latent_attention(its_q, up, kv, there, step.kind, planned, asked)
    here = plain_attention.plan(inputs, step.kind, cos_sin, q.dtype)
    plain.latent_store(given, q, norm, 1e-6, cos_sin, inputs, step.kv, here)
    return seen, right(step)
