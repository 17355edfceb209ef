"""Mamba2's kernels on a GPU at models' sizes: against fp64, token by token; rows, chunks and both;
the gated norm."""

from __future__ import annotations

import pytest
import torch
from mamba2_cases import drawn, empty, in_fp64, made
from state_steps import in_pieces, with_drafts

from penstock.kernels.inputs import StepInputs
from penstock.kernels.mamba2 import Mamba2Heads
from penstock.kernels.reference.recurrent import mamba2 as plain
from penstock.kernels.triton.recurrent.mamba2 import gated_norm, mamba2

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

# Of the largest answer: bfloat16 rounds x, B, C and what is multiplied on tensor cores, states not
# at all.
MOST_OFF = {torch.float32: 2e-4, torch.bfloat16: 6e-2}
SHAPES = pytest.mark.parametrize(
    "heads",
    [
        Mamba2Heads(16, 64, 2, 128),
        Mamba2Heads(6, 64, 1, 256),
        Mamba2Heads(4, 128, 2, 256),
        Mamba2Heads(3, 80, 1, 96),
        Mamba2Heads(8, 32, 2, 64),  # narrow ones, as the delta rule's
        Mamba2Heads(4, 16, 1, 32),
    ],
    ids=str,
)


@SHAPES
@pytest.mark.parametrize("dtype", MOST_OFF, ids=str)
def test_chunks_then_rows_are_what_fp64_gives(heads: Mamba2Heads, dtype: torch.dtype) -> None:
    cuts, weights = (1, 130, 64, 63, 2, 100), made(heads, device="cuda", dtype=dtype)
    given = [tuple(x.to("cuda", dtype) for x in drawn(400, heads, seed)) for seed in range(3)]
    right = [in_fp64(each[0].cpu(), heads, made(heads, dtype=dtype))[0] for each in given]
    window, matrix = empty(heads, 6, dtype=dtype, device="cuda")

    def layer(given: torch.Tensor, asked: StepInputs) -> torch.Tensor:
        return mamba2(given, heads, weights, window, matrix, asked)

    found = in_pieces(
        layer, given, [(cut, cuts[-1 - number], 7) for number, cut in enumerate(cuts)], "cuda"
    )
    for each, one in zip(found, right, strict=True):
        off = (each.cpu().double() - one).abs()
        assert (
            off.max() < MOST_OFF[dtype] * one.abs().max()
            and off.mean() < MOST_OFF[dtype] / 20 * one.abs().max()
        )
    assert not matrix[[0, 4, 5]].any() and not window[[0, 4, 5]].any(), (
        "another's state was changed"
    )


@SHAPES
@pytest.mark.parametrize("dtype", MOST_OFF, ids=str)
def test_rows_with_drafts_are_what_fp64_gives(heads: Mamba2Heads, dtype: torch.dtype) -> None:
    weights = made(heads, device="cuda", dtype=dtype)
    given = [tuple(x.to("cuda", dtype) for x in drawn(60, heads, seed)) for seed in range(3)]
    window, matrix = empty(heads, 4, dtype=dtype, device="cuda", drafts=4)

    def layer(given: torch.Tensor, asked: StepInputs) -> torch.Tensor:
        return mamba2(given, heads, weights, window, matrix, asked)

    for (tokens,), found in zip(given, with_drafts(layer, given, 4, device="cuda"), strict=True):
        right, _ = in_fp64(tokens.cpu(), heads, made(heads, dtype=dtype))
        off = (found.cpu().double() - right).abs()
        assert off.max() < MOST_OFF[dtype] * right.abs().max()
    assert not matrix[0].any() and not window[0].any(), "a row that has ended stored something"


@pytest.mark.parametrize(("width", "groups"), [(4096, 8), (3072, 1), (8192, 8), (960, 3)])
@pytest.mark.parametrize("form", ["wide", "eight", "pair"])
def test_a_gated_norm(width: int, groups: int, form: str) -> None:
    draw = torch.Generator("cuda").manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device="cuda", dtype=torch.bfloat16)

    x, gate, weight = normal(300, width), normal(300, 2 * width)[:, :width], normal(width)
    ours, theirs = (
        column(x, gate, weight, groups, 1e-5, form) for column in (gated_norm, plain.gated_norm)
    )
    if form == "wide":
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
        return
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=2e-2, atol=0)
    worth = [each.numbers.float() * each.scale for each in (ours, theirs)]
    assert (worth[0] - worth[1]).abs().max() < 0.1 * worth[1].abs().max()
