"""The gated short convolution: against fp64, in pieces as in one, rows that don't fold; Triton's in
its interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton_interpreter  # noqa: F401  (before the kernels)
from state_steps import step, step_with_drafts, with_drafts
from torch import Tensor

from penstock.kernels.reference.recurrent import short_conv as plain
from penstock.kernels.triton.recurrent import short_conv as triton

pytestmark = pytest.mark.torch

Conv = Callable[..., Tensor]
BOTH = pytest.mark.parametrize(
    "conv", [plain.short_conv, triton.short_conv], ids=["reference", "triton"]
)


def windows(slots: int, taps: int, channels: int) -> Tensor:
    """Empty ones, beside which a slot has something else."""
    return torch.zeros(slots, taps * channels + 8)[:, 8:].unflatten(1, (taps, channels))


def drawn(tokens: int, channels: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, 3 * channels, generator=torch.Generator().manual_seed(seed))


def in_fp64(given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A sequence from its beginning."""
    gate_in, gate_out, values = given.double().chunk(3, dim=1)
    came = torch.cat(
        (torch.zeros(weight.shape[1] - 1, weight.shape[0], dtype=torch.float64), gate_in * values)
    )
    mixed = sum(
        came[tap : tap + len(given)] * weight[:, tap].double() for tap in range(weight.shape[1])
    )
    return gate_out * (mixed if bias is None else mixed + bias.double())


@BOTH
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("taps", [2, 3, 5])
def test_however_a_sequence_is_cut(conv: Conv, taps: int, biased: bool) -> None:
    """Chunks of 1 to 6 tokens, an empty one, and rows, of two sequences at once; each by itself in
    one chunk is the same to the bit, and what fp64 gives."""
    channels, tokens = 19, 17
    weight = torch.randn(channels, taps, generator=torch.Generator().manual_seed(9))
    bias = torch.randn(channels, generator=torch.Generator().manual_seed(8)) if biased else None
    given = [drawn(tokens, channels, seed) for seed in range(2)]
    window = windows(5, taps, channels)
    whole = [
        conv(each, weight, bias, window, step([], [(slot, 0, tokens)]))
        for slot, each in enumerate(given)
    ]
    for each, found in zip(given, whole, strict=True):
        torch.testing.assert_close(
            found.double(), in_fp64(each, weight, bias), rtol=1e-5, atol=1e-5
        )
    window[2:] = 0.0
    found: list[list[Tensor]] = [[], []]
    at = [0, 0]
    for first, second in ((1, 6), (4, 0), (2, 1), (6, 2)):
        parts = [given[0][at[0] : at[0] + first], given[1][at[1] : at[1] + second]]
        out = conv(
            torch.cat(parts),
            weight,
            bias,
            window,
            step([], [(2, at[0], first), (3, at[1], second)]),
        )
        for sequence, piece in enumerate(out.split([first, second])):
            found[sequence].append(piece)
            at[sequence] += len(piece)
    while at[1] < tokens:  # rows; the first sequence has ended by and by
        here = [sequence for sequence in (1, 0) if at[sequence] < tokens]
        fed = torch.stack([given[sequence][at[sequence]] for sequence in here])
        rows = conv(fed, weight, bias, window, step([(2 + s, at[s], True) for s in here], []))
        for sequence, row in zip(here, rows, strict=True):
            found[sequence].append(row[None])
            at[sequence] += 1
    assert all(torch.equal(torch.cat(each), one) for each, one in zip(found, whole, strict=True))


@BOTH
def test_a_row_that_does_not_fold_answers_as_it_did(conv: Conv) -> None:
    channels, weight = 8, torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    window = windows(4, 3, channels).normal_(generator=torch.Generator().manual_seed(2))
    given = drawn(2, channels)
    first = conv(given, weight, None, window, step([(1, 7, True), (2, 4, True)], []))
    held = window.clone()
    again = conv(given, weight, None, window, step([(1, 7, False), (2, 5, True)], []))
    assert torch.equal(again[0], first[0]) and torch.equal(window[1], held[1])
    assert not torch.equal(again[1], first[1]) and not torch.equal(window[2], held[2])
    assert torch.equal(window[[0, 3]], held[[0, 3]]), "another's window was moved on"


@BOTH
def test_rows_with_drafts_answer_as_without(conv: Conv) -> None:
    channels, taps, most = 8, 3, 3
    weight = torch.randn(channels, taps, generator=torch.Generator().manual_seed(1))
    window, given = windows(3, taps + 2 * most, channels), [drawn(24, channels, s) for s in (0, 1)]
    found = with_drafts(
        lambda given, asked: conv(given, weight, None, window, asked),
        [(each,) for each in given],
        most,
    )
    for each, answers in zip(given, found, strict=True):
        torch.testing.assert_close(
            answers.double(), in_fp64(each, weight, None), rtol=1e-5, atol=1e-5
        )
    assert not window[0].any(), "a row that has ended stored something"


def test_the_columns_agree_beside_each_other() -> None:
    """Rows and chunks in one step; in the interpreter a sum may be taken with one rounding less."""
    channels, weight = 40, torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    given, chunks = drawn(3 + 9, channels), [(2, 4, 7), (4, 0, 2)]
    for width, asked in (
        (3, step([(0, 3, True), (5, 8, False), (1, 1, True)], chunks)),
        (7, step_with_drafts([(0, 3, 1, 2), (5, 8, 9, 1)], chunks)),
    ):
        held = [
            windows(6, width, channels).normal_(generator=torch.Generator().manual_seed(2))
            for _ in range(2)
        ]
        one, other = (
            conv(given, weight, None, window, asked)
            for conv, window in zip((plain.short_conv, triton.short_conv), held, strict=True)
        )
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert torch.equal(*held)
