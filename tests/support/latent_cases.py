"""Steps over latent vectors, and what fp64 gives token by token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from kernels_naive import Case
from torch import Tensor

from penstock.kernels.fp8_rows import E4M3
from penstock.kernels.inputs import AttentionKind
from penstock.kernels.latent import LatentSizes
from penstock.kernels.state_forms import LatentForm, LatentKv


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
