"""Heads, weights and tokens of a Mamba2 layer, and what fp64 gives token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.mamba2 import Mamba2Heads, Mamba2Weights
from penstock.kernels.state_forms import RecurrentForm, StatePart


def made(
    heads: Mamba2Heads,
    taps: int = 4,
    *,
    bias: bool = True,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Mamba2Weights:
    draw = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    return Mamba2Weights(
        taps=(normal(heads.channels, taps) * 0.5).to(device, dtype),
        taps_bias=(normal(heads.channels) * 0.3).to(device, dtype) if bias else None,
        a=(-torch.rand(heads.heads, generator=draw) - 0.01).to(device),
        step_bias=(normal(heads.heads) - 1).to(device),
        skip=normal(heads.heads).to(device),
    )


def drawn(tokens: int, heads: Mamba2Heads, seed: int = 0) -> tuple[Tensor]:
    return (torch.randn(tokens, heads.columns, generator=torch.Generator().manual_seed(seed)),)


def empty(
    heads: Mamba2Heads,
    slots: int,
    taps: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    drafts: int = 0,
) -> tuple[Tensor, Tensor]:
    """A window and a matrix of each slot, as an engine has them: parts of one slot."""
    window = StatePart("window", (taps, heads.channels), dtype, beside=heads.heads)
    matrix = StatePart("matrix", (heads.heads, heads.state_width, heads.head_width), torch.float32)
    form = RecurrentForm((window, matrix)).for_drafts(drafts)
    views = form.over(torch.zeros(slots, form.slot_bytes, dtype=torch.uint8, device=device))
    return views["window"], views["matrix"]


def in_fp64(given: Tensor, h: Mamba2Heads, w: Mamba2Weights) -> tuple[Tensor, Tensor]:
    """A sequence from its beginning, token by token, by the recurrence's own lines -> its answers,
    and the state behind them [heads, values, keys]."""
    given, taps = given.double(), w.taps.shape[1]
    seen = torch.cat(
        (
            torch.zeros(taps - 1, h.channels, dtype=torch.float64),
            given[:, h.size : h.size + h.channels],
        )
    )
    mixed = sum(seen[tap : tap + len(given)] * w.taps[:, tap].double() for tap in range(taps))
    if w.taps_bias is not None:
        mixed = mixed + w.taps_bias.double()
    mixed = mixed * mixed.sigmoid()
    state = torch.zeros(h.heads, h.head_width, h.state_width, dtype=torch.float64)
    answers = []
    for each, size in zip(mixed, given[:, -h.heads :], strict=True):
        x, b, c = each.split((h.size, h.group_size, h.group_size))
        b, c = (
            part.view(h.groups, -1).repeat_interleave(h.heads // h.groups, 0) for part in (b, c)
        )
        x, dt = x.view(h.heads, -1), torch.log1p((size + w.step_bias).exp())
        state = state * (dt * w.a).exp()[:, None, None] + (dt[:, None] * x)[:, :, None] * b[:, None]
        answers.append(((state @ c[:, :, None])[:, :, 0] + w.skip[:, None] * x).flatten())
    return torch.stack(answers), state
