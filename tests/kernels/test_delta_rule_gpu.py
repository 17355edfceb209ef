"""The gated delta rule's kernels on a GPU at a model's sizes: against fp64, token by token; rows,
chunks and both."""

from __future__ import annotations

import pytest
import torch
from delta_cases import drawn, empty, in_fp64, made
from state_steps import in_pieces, with_drafts

from penstock.kernels.delta_rule import DeltaHeads
from penstock.kernels.inputs import StepInputs
from penstock.kernels.triton.recurrent.delta_rule import delta_rule

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

# The largest of an answer's numbers are about 3: bfloat16 rounds q, k, v, the answer and its norm,
# states not at all.
MOST_OFF = {torch.float32: 2e-4, torch.bfloat16: 6e-2}
SHAPES = pytest.mark.parametrize(
    "heads",
    [
        DeltaHeads(4, 8, 128, 128),
        DeltaHeads(2, 2, 64, 128),
        DeltaHeads(1, 3, 96, 80),
        # Narrow ones: products of less than 64 columns, which Triton 3.6 gets wrong on Hopper.
        DeltaHeads(4, 4, 32, 32),
        DeltaHeads(2, 4, 16, 16),
        DeltaHeads(2, 2, 128, 32),
    ],
    ids=str,
)


@SHAPES
@pytest.mark.parametrize("dtype", MOST_OFF, ids=str)
def test_chunks_then_rows_are_what_fp64_gives(heads: DeltaHeads, dtype: torch.dtype) -> None:
    tokens, cuts = 400, (1, 130, 64, 63, 2, 100)
    weights = made(heads, device="cuda", dtype=dtype)
    given = [tuple(x.to("cuda", dtype) for x in drawn(tokens, heads, seed)) for seed in range(3)]
    right = [
        in_fp64(*(x.cpu() for x in each), heads, made(heads, dtype=dtype))[0] for each in given
    ]
    window, matrix = empty(heads, 6, dtype=dtype, device="cuda")

    def layer(given: torch.Tensor, rates: torch.Tensor, asked: StepInputs) -> torch.Tensor:
        return delta_rule(given, rates, heads, weights, window, matrix, asked)

    found = in_pieces(
        layer, given, [(cut, cuts[-1 - number], 7) for number, cut in enumerate(cuts)], "cuda"
    )
    for each, one in zip(found, right, strict=True):
        off = (each.cpu().double() - one).abs()
        assert off.max() < MOST_OFF[dtype] * one.abs().max() and off.mean() < MOST_OFF[dtype] / 20
    assert not matrix[[0, 4, 5]].any() and not window[[0, 4, 5]].any(), (
        "another's state was changed"
    )


@SHAPES
@pytest.mark.parametrize("dtype", MOST_OFF, ids=str)
def test_rows_with_drafts_are_what_fp64_gives(heads: DeltaHeads, dtype: torch.dtype) -> None:
    weights = made(heads, device="cuda", dtype=dtype)
    given = [tuple(x.to("cuda", dtype) for x in drawn(60, heads, seed)) for seed in range(3)]
    window, matrix = empty(heads, 4, dtype=dtype, device="cuda", drafts=4)

    def layer(given: torch.Tensor, rates: torch.Tensor, asked: StepInputs) -> torch.Tensor:
        return delta_rule(given, rates, heads, weights, window, matrix, asked)

    for each, found in zip(given, with_drafts(layer, given, 4, device="cuda"), strict=True):
        right, _ = in_fp64(*(x.cpu() for x in each), heads, made(heads, dtype=dtype))
        off = (found.cpu().double() - right).abs()
        assert off.max() < MOST_OFF[dtype] * right.abs().max()
    assert not matrix[0].any() and not window[0].any(), "a row that has ended stored something"
