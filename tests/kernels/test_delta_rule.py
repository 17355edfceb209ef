"""The gated delta rule: against fp64 token by token, in pieces as in one, rows that don't fold;
Triton's in its interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton_interpreter  # noqa: F401  (before the kernels)
from delta_cases import drawn, empty, in_fp64, made
from state_steps import in_pieces, step, step_with_drafts, with_drafts
from torch import Tensor

from penstock.kernels.delta_rule import DeltaHeads, DeltaWeights
from penstock.kernels.inputs import StepInputs
from penstock.kernels.reference.recurrent import delta_rule as plain
from penstock.kernels.triton.recurrent import delta_rule as triton

pytestmark = pytest.mark.torch

Rule = Callable[..., Tensor]
BOTH = pytest.mark.parametrize(
    "rule", [plain.delta_rule, triton.delta_rule], ids=["reference", "triton"]
)
SHAPES = pytest.mark.parametrize(
    "heads", [DeltaHeads(2, 4, 16, 16), DeltaHeads(1, 3, 24, 20), DeltaHeads(2, 2, 32, 64)], ids=str
)


@BOTH
@SHAPES
def test_however_a_sequence_is_cut(rule: Rule, heads: DeltaHeads) -> None:
    """Chunks of 1 to 131 tokens, an empty one, and rows, of two sequences at once: what fp64 gives
    token by token."""
    tokens, weights = 140, made(heads)
    given = [drawn(tokens, heads, seed) for seed in range(2)]
    right = [in_fp64(*each, heads, weights)[0] for each in given]
    window, matrix = empty(heads, 4)

    def layer(given: Tensor, rates: Tensor, asked: StepInputs) -> Tensor:
        return rule(given, rates, heads, weights, window, matrix, asked)

    found = in_pieces(layer, given, [(1, 131), (70, 0), (2, 1), (63, 4)])
    for each, one in zip(found, right, strict=True):
        torch.testing.assert_close(each.double(), one, rtol=1e-3, atol=1e-4)


@BOTH
def test_a_row_that_does_not_fold_answers_as_it_did(rule: Rule) -> None:
    heads = DeltaHeads(2, 4, 16, 16)
    weights, (given, rates) = made(heads), drawn(2, heads)
    window, matrix = (
        each.normal_(generator=torch.Generator().manual_seed(2)) for each in empty(heads, 4)
    )
    first = rule(
        given, rates, heads, weights, window, matrix, step([(1, 7, True), (2, 4, True)], [])
    )
    held = window.clone(), matrix.clone()
    again = rule(
        given, rates, heads, weights, window, matrix, step([(1, 7, False), (2, 5, True)], [])
    )
    assert torch.equal(again[0], first[0]) and not torch.equal(again[1], first[1])
    for now, before in zip((window, matrix), held, strict=True):
        assert torch.equal(now[1], before[1]) and not torch.equal(now[2], before[2])
        assert torch.equal(now[[0, 3]], before[[0, 3]]), "another's state was changed"


@BOTH
def test_rows_with_drafts_answer_as_without(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right and wrong drafts, steps made again; the columns of a state in two parts."""
    monkeypatch.setattr(triton, "_AT_ONCE", 128)
    heads, most = DeltaHeads(1, 2, 8, 20), 3
    weights, given = made(heads), [drawn(13, heads, seed) for seed in range(2)]
    window, matrix = empty(heads, 3, drafts=most)

    def layer(given: Tensor, rates: Tensor, asked: StepInputs) -> Tensor:
        return rule(given, rates, heads, weights, window, matrix, asked)

    for each, found in zip(given, with_drafts(layer, given, most), strict=True):
        right, _ = in_fp64(*each, heads, weights)
        torch.testing.assert_close(found.double(), right, rtol=1e-3, atol=1e-4)
    assert not matrix[0].any() and not window[0].any(), "a row that has ended stored something"


def test_the_columns_agree_beside_each_other() -> None:
    """Rows and chunks in one step, from states that are full."""
    heads = DeltaHeads(2, 4, 32, 16)
    weights, (given, rates) = made(heads), drawn(3 + 9, heads)
    chunks = [(2, 4, 7), (4, 0, 2)]
    for drafts, asked in (
        (0, step([(0, 3, True), (5, 8, False), (1, 1, True)], chunks)),
        (2, step_with_drafts([(0, 3, 1, 2), (5, 8, 9, 1)], chunks)),
    ):
        found: list[Any] = []
        for rule in (plain.delta_rule, triton.delta_rule):
            draw = torch.Generator().manual_seed(2)
            own = [each.normal_(generator=draw) for each in empty(heads, 6, drafts=drafts)]
            found.append((rule(given, rates, heads, weights, *own, asked), *own))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_keys_that_are_all_the_same() -> None:
    """The worst of a block's system: no decay, the same key at every token, whole writes. It is
    inverted as well."""
    heads, tokens = DeltaHeads(1, 1, 16, 16), 64
    weights = made(heads)
    weights = DeltaWeights(
        weights.taps, torch.full((1,), -1e-6), weights.step_bias, weights.norm, weights.eps
    )
    given, rates = drawn(1, heads)
    given, rates = given.repeat(tokens, 1), torch.full((tokens, 2), 9.0)
    right, _ = in_fp64(given, rates, heads, weights)
    for rule in (plain.delta_rule, triton.delta_rule):
        out = rule(given, rates, heads, weights, *empty(heads, 1), step([], [(0, 0, tokens)]))
        torch.testing.assert_close(out.double(), right, rtol=1e-3, atol=1e-4)
