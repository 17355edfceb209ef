"""Mamba2's recurrence: against fp64 token by token, in pieces as in one, rows that don't fold; its
gated norm; Triton's in its interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton_interpreter  # noqa: F401  (before the kernels)
from mamba2_cases import drawn, empty, in_fp64, made
from state_steps import in_pieces, step, step_with_drafts, with_drafts
from torch import Tensor

from penstock.kernels.inputs import StepInputs
from penstock.kernels.mamba2 import Mamba2Heads
from penstock.kernels.reference.recurrent import mamba2 as plain
from penstock.kernels.triton.recurrent import mamba2 as triton

pytestmark = pytest.mark.torch

Scan = Callable[..., Tensor]
BOTH = pytest.mark.parametrize("scan", [plain.mamba2, triton.mamba2], ids=["reference", "triton"])
SHAPES = [Mamba2Heads(4, 16, 2, 32), Mamba2Heads(3, 20, 1, 24), Mamba2Heads(2, 32, 2, 16)]


@BOTH
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_however_a_sequence_is_cut(scan: Scan, heads: Mamba2Heads) -> None:
    """Chunks of 1 to 131 tokens, an empty one, and rows, of two sequences at once: what fp64 gives
    token by token."""
    weights = made(heads, bias=heads.groups > 1)
    given = [drawn(140, heads, seed) for seed in range(2)]
    window, matrix = empty(heads, 4)

    def layer(given: Tensor, asked: StepInputs) -> Tensor:
        return scan(given, heads, weights, window, matrix, asked)

    found = in_pieces(layer, given, [(1, 131), (70, 0), (2, 1), (63, 4)])
    for each, (tokens,) in zip(found, given, strict=True):
        torch.testing.assert_close(
            each.double(), in_fp64(tokens, heads, weights)[0], rtol=1e-3, atol=1e-4
        )
    assert not matrix[[0, 3]].any() and not window[[0, 3]].any(), "another's state was changed"


@BOTH
def test_a_row_that_does_not_fold_answers_as_it_did(scan: Scan) -> None:
    heads = SHAPES[0]
    weights, (given,) = made(heads), drawn(2, heads)
    window, matrix = (
        each.normal_(generator=torch.Generator().manual_seed(2)) for each in empty(heads, 4)
    )
    first = scan(given, heads, weights, window, matrix, step([(1, 7, True), (2, 4, True)], []))
    held = window.clone(), matrix.clone()
    again = scan(given, heads, weights, window, matrix, step([(1, 7, False), (2, 5, True)], []))
    assert torch.equal(again[0], first[0]) and not torch.equal(again[1], first[1])
    for now, before in zip((window, matrix), held, strict=True):
        assert torch.equal(now[1], before[1]) and not torch.equal(now[2], before[2])
        assert torch.equal(now[[0, 3]], before[[0, 3]]), "another's state was changed"


@BOTH
def test_rows_with_drafts_answer_as_without(scan: Scan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right and wrong drafts, steps made again; the columns of a state in two parts."""
    monkeypatch.setattr(triton, "_AT_ONCE", 64)
    heads, most = Mamba2Heads(2, 12, 1, 8), 3
    weights, given = made(heads), [drawn(13, heads, seed) for seed in range(2)]
    window, matrix = empty(heads, 3, drafts=most)

    def layer(given: Tensor, asked: StepInputs) -> Tensor:
        return scan(given, heads, weights, window, matrix, asked)

    for (tokens,), found in zip(given, with_drafts(layer, given, most), strict=True):
        right, _ = in_fp64(tokens, heads, weights)
        torch.testing.assert_close(found.double(), right, rtol=1e-3, atol=1e-4)
    assert not matrix[0].any() and not window[0].any(), "a row that has ended stored something"


def test_the_columns_agree_beside_each_other() -> None:
    """Rows and chunks in one step, from states that are full."""
    heads = SHAPES[0]
    weights, (given,) = made(heads), drawn(3 + 9, heads)
    chunks = [(2, 4, 7), (4, 0, 2)]
    for drafts, asked in (
        (0, step([(0, 3, True), (5, 8, False), (1, 1, True)], chunks)),
        (2, step_with_drafts([(0, 3, 1, 2), (5, 8, 9, 1)], chunks)),
    ):
        found: list[Any] = []
        for scan in (plain.mamba2, triton.mamba2):
            draw = torch.Generator().manual_seed(2)
            own = [each.normal_(generator=draw) for each in empty(heads, 6, drafts=drafts)]
            found.append((scan(given, heads, weights, *own, asked), *own))
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_steps_without_end_and_of_nothing() -> None:
    """A state that is forgotten whole at a token, and one that no token changes: no number is lost
    to infinity."""
    heads = SHAPES[0]
    weights, (given,) = made(heads), drawn(70, heads)
    given[:, -heads.heads :] = torch.tensor([300.0, -300.0, 300.0, -300.0])
    right, _ = in_fp64(given, heads, weights)
    for scan in (plain.mamba2, triton.mamba2):
        out = scan(given, heads, weights, *empty(heads, 1), step([], [(0, 0, 70)]))
        torch.testing.assert_close(out.double(), right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("width", "groups"), [(64, 1), (96, 4), (60, 3)])
def test_a_gated_norm(width: int, groups: int) -> None:
    draw = torch.Generator().manual_seed(3)
    x, gate, weight = (
        torch.randn(5, width, generator=draw),
        torch.randn(5, 2 * width),
        torch.randn(width),
    )
    gate = gate[:, :width]  # rows that stand apart
    wide = (x.double() * gate.double() * gate.double().sigmoid()).view(5, groups, -1)
    right = (wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(
        5, width
    ) * weight.double()
    for column in (plain, triton):
        made = column.gated_norm(x, gate, weight, groups, 1e-5)
        torch.testing.assert_close(made.double(), right, rtol=1e-4, atol=1e-5)
        plainly = column.gated_norm(x, gate, None, groups, 1e-5)
        torch.testing.assert_close(plainly.double(), wide.view(5, width), rtol=1e-4, atol=1e-5)
    in_eight = [
        column.gated_norm(x, gate, weight, groups, 1e-5, "eight") for column in (plain, triton)
    ]
    torch.testing.assert_close(in_eight[0].scale, in_eight[1].scale, rtol=1e-5, atol=0)
    both = [each.numbers.float() * each.scale for each in in_eight]
    assert all((each.double() - right).abs().max() < 0.07 * right.abs().max() for each in both)
