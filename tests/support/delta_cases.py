"""Heads, weights and tokens of a gated delta rule, and what fp64 gives token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.delta_rule import DeltaHeads, DeltaWeights
from penstock.kernels.state_forms import RecurrentForm, StatePart


def made(
    heads: DeltaHeads, taps: int = 4, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> DeltaWeights:
    draw = torch.Generator().manual_seed(7)
    return DeltaWeights(
        taps=(torch.randn(heads.channels, taps, generator=draw) * 0.5).to(device, dtype),
        decay=(-torch.rand(heads.value_heads, generator=draw) * 2 - 0.01).to(device),
        step_bias=torch.randn(heads.value_heads, generator=draw).to(device),
        norm=(1 + 0.3 * torch.randn(heads.value_width, generator=draw)).to(device, dtype),
        eps=1e-6,
    )


def drawn(tokens: int, heads: DeltaHeads, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    given = torch.randn(tokens, heads.channels + heads.value_size, generator=draw)
    return given, torch.randn(tokens, 2 * heads.value_heads, generator=draw)


def empty(
    heads: DeltaHeads,
    slots: int,
    taps: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    drafts: int = 0,
) -> tuple[Tensor, Tensor]:
    """A window and a matrix of each slot, as an engine has them: parts of one slot."""
    window = StatePart("window", (taps, heads.channels), dtype, beside=2 * heads.value_heads)
    matrix = StatePart(
        "matrix", (heads.value_heads, heads.key_width, heads.value_width), torch.float32
    )
    form = RecurrentForm((window, matrix)).for_drafts(drafts)
    views = form.over(torch.zeros(slots, form.slot_bytes, dtype=torch.uint8, device=device))
    return views["window"], views["matrix"]


def in_fp64(given: Tensor, rates: Tensor, h: DeltaHeads, w: DeltaWeights) -> tuple[Tensor, Tensor]:
    """A sequence from its beginning, token by token, by the rule's own lines -> its answers, and
    the state behind them [heads, values, keys]."""
    given, rates = given.double(), rates.double()
    before = torch.zeros(w.taps.shape[1] - 1, h.channels, dtype=torch.float64)
    seen = torch.cat((before, given[:, : h.channels]))
    mixed = sum(
        seen[tap : tap + len(given)] * w.taps[:, tap].double() for tap in range(w.taps.shape[1])
    )
    mixed = mixed * mixed.sigmoid()
    state = torch.zeros(h.value_heads, h.value_width, h.key_width, dtype=torch.float64)
    answers = []
    for token, (each, rate, size) in enumerate(
        zip(mixed, *rates.split(h.value_heads, 1), strict=True)
    ):
        q, k, v = each.split((h.key_size, h.key_size, h.value_size))
        q, k = (
            x.view(h.key_heads, -1).repeat_interleave(h.value_heads // h.key_heads, 0)
            for x in (q, k)
        )
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        state = (
            state
            * (w.decay.double() * torch.log1p((size + w.step_bias).exp())).exp()[:, None, None]
        )
        found = (state @ k[:, :, None])[:, :, 0]
        state = (
            state
            + (rate.sigmoid()[:, None] * (v.view(h.value_heads, -1) - found))[:, :, None]
            * k[:, None]
        )
        answer = (state @ q[:, :, None])[:, :, 0] * h.key_width**-0.5
        z = given[token, h.channels :].view(answer.shape)
        normed = answer / (answer.square().mean(-1, keepdim=True) + w.eps).sqrt() * w.norm.double()
        answers.append((normed * z * z.sigmoid()).flatten())
    return torch.stack(answers), state
