"""Steps over latent vectors, and what fp64 gives token by token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from kernels_naive import Case
from torch import Tensor

from penstock.kernels.inputs import AttentionKind
from penstock.kernels.state_forms import LatentKv


def of_latents(
    case: Case, rank: int, turning: int, dtype: torch.dtype = torch.float32
) -> tuple[Case, LatentKv, AttentionKind]:
    """The same step over vectors, with queries of their width. Scores are spread by about 3 at any width."""
    draw = torch.Generator().manual_seed(3)
    tokens, heads, _ = case.q.shape
    kv = LatentKv(torch.randn(case.kv.shape[0], 16, rank + turning, generator=draw).to(dtype), rank)
    q = torch.randn(tokens, heads, rank + turning, generator=draw).to(dtype)
    kind = AttentionKind(
        heads=heads, kv_heads=1, width=rank + turning, rope=0, window=None, scale=3 * (rank + turning) ** -0.5,
        value_width=rank,
    )  # fmt: skip
    return replace(case, q=q), kv, kind


def right(case: Case, kv: LatentKv, scale: float, tokens: Iterable[int] | None = None) -> Tensor:
    """The answers of some tokens, or all, in fp64."""
    found = []
    for token in range(len(case.positions)) if tokens is None else tokens:
        seen = torch.arange(case.positions[token] + 1)
        vectors = kv.latent[case.tables[token].long()[seen // 16], seen % 16].double()
        weights = torch.softmax(case.q[token].double() @ vectors.T * scale, -1)
        found.append(weights @ vectors[:, : kv.value_width])
    return torch.stack(found)
