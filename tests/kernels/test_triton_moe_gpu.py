"""The kernels of experts compiled: sizes of models and awkward ones, numbers of tokens at which the
plan changes."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.routing import Routing

pytestmark = [pytest.mark.torch, pytest.mark.gpu]


@pytest.mark.parametrize("rows", [0, 16, 64, 128])
@pytest.mark.parametrize(
    "shape", [(1, 128, 8), (700, 128, 8), (3000, 60, 4), (20000, 8, 2), (9, 512, 10)], ids=str
)
def test_routes(rows, shape):
    from triton_kernel_cases_moe import check_routes

    tokens, count, top_k = shape
    check_routes("cuda", tokens, count, Routing(top_k=top_k, renormalise=tokens != 700), rows)


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(
    "shape", [(256, 8, 8, 4), (128, 8, 1, 1), (160, 6, 8, 3), (96, 4, 3, 2)], ids=str
)
def test_routes_with_a_correction_and_groups(shape, sigmoid):
    from triton_kernel_cases_moe import check_routes

    count, top_k, groups, kept = shape
    by = Routing(
        top_k=top_k, renormalise=True, sigmoid=sigmoid, groups=groups, kept_groups=kept, scale=2.5
    )
    check_routes("cuda", 700, count, by, 16, corrected=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "channel", "blocks"])
@pytest.mark.parametrize("tokens", [1, 4, 5, 16, 17, 40, 130, 400, 900])
@pytest.mark.parametrize("shape", [(16, 512, 192, 4), (8, 200, 136, 2), (5, 1024, 768, 1)], ids=str)
def test_experts(dtype, kind, tokens, shape):
    from triton_kernel_cases_moe import check_experts

    check_experts("cuda", dtype, kind, tokens, *shape)


@pytest.mark.parametrize("kind", ["plain", "channel", "blocks"])
@pytest.mark.parametrize("tokens", [1, 4, 17, 400])
def test_experts_without_a_gate(kind, tokens):
    from triton_kernel_cases_moe import check_experts

    check_experts("cuda", torch.bfloat16, kind, tokens, 16, 512, 192, 4, gate="none")


@pytest.mark.parametrize("kind", ["plain", "channel", "blocks"])
@pytest.mark.parametrize("tokens", [1, 4, 17, 400])
def test_experts_gated_by_gelu_whose_answers_are_scaled(kind, tokens):
    from triton_kernel_cases_moe import check_experts

    check_experts(
        "cuda", torch.bfloat16, kind, tokens, 16, 512, 192, 4, gate="gelu_tanh", scaled=True
    )


@pytest.mark.parametrize("tokens", [1, 4, 5, 16, 17, 40, 130, 400, 900])
@pytest.mark.parametrize("shape", [(32, 512, 320, 4), (8, 2880, 96, 2)], ids=str)
def test_experts_in_four_bits(tokens, shape):
    from triton_kernel_cases_moe import check_experts

    check_experts("cuda", torch.bfloat16, "four", tokens, *shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 5, 16, 17, 40, 130, 400, 900])
@pytest.mark.parametrize(
    "shape", [(32, 512, 320, 4), (8, 2880, 96, 2), (16, 2048, 768, 8)], ids=str
)
def test_experts_in_nvfp4(tokens, shape, dtype):
    from triton_kernel_cases_moe import check_experts

    check_experts("cuda", dtype, "nvfp4", tokens, *shape)


@pytest.mark.parametrize("tokens", [1, 4, 17, 120, 700])
@pytest.mark.parametrize("inner", [2880, 1440])
def test_experts_of_gpt_oss(tokens, inner):
    """Its own sizes, and a rank's of two, of an eighth of its experts: all cuts of its plan, and
    words of scales that are not filled."""
    from triton_kernel_cases_moe import check_experts

    check_experts("cuda", torch.bfloat16, "four", tokens, 4, 2880, inner, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "kind", ["int4", "int4 zeros", "int4 row", "int8", "int8 zeros", "int8 row", "int8 row zeros"]
)
@pytest.mark.parametrize("tokens", [1, 4, 5, 17, 130, 900])
@pytest.mark.parametrize("shape", [(16, 512, 192, 4), (8, 320, 96, 2), (5, 1024, 768, 1)], ids=str)
def test_experts_in_integers(dtype, kind, tokens, shape):
    from triton_kernel_cases_moe import check_experts

    check_experts("cuda", dtype, kind, tokens, *shape)


@pytest.mark.parametrize("kind", ["plain", "channel"])
def test_all_to_the_same_experts(kind):
    from triton_kernel_cases_moe import check_experts, crowded

    check_experts("cuda", torch.bfloat16, kind, 300, 64, 256, 128, 4, scores=crowded(300, 64, 4))


@pytest.mark.parametrize("kind", ["plain", "channel", "blocks"])
@pytest.mark.parametrize("tokens", [4, 90, 600])
def test_a_token_alone_gives_the_same_bits(kind, tokens):
    from triton_kernel_cases_moe import check_alone

    check_alone("cuda", torch.bfloat16, kind, tokens)


def test_few_tokens_are_not_sorted():
    from triton_kernel_cases_moe import made_experts, moe

    of, _, _ = made_experts("cuda", torch.bfloat16, "plain", 8, 64, 64, 2)
    assert [moe.plan_of(tokens, of).sorted for tokens in (1, 4, 5, 900)] == [
        False,
        False,
        True,
        True,
    ]


def test_many_inputs_of_down_scaled_by_row_are_summed_as_precisely_as_in_groups():
    """Products whose scales come last stay in the tensor cores' sums over all inputs."""
    from dataclasses import replace

    import triton_kernel_cases_moe as cases

    tokens, count, d, inner = 256, 2, 512, 14336
    of, gate_up, down = cases.made_experts("cuda", torch.bfloat16, "channel", count, d, inner, 2)
    x = cases.drawn(tokens, d, seed=7, dtype=torch.bfloat16)
    scores = cases.drawn(tokens, count, seed=8, by=2.0, dtype=torch.bfloat16)
    wanted, _ = cases.naive(x, scores, of, gate_up, down)
    by_row, prepared = cases.moe.plan_of(tokens, of), cases.moe.prepare_experts(of)
    assert by_row.scaled_by_row
    cut = replace(by_row.gate_up, outputs=128, warps=8)
    by_group = replace(by_row, gate_up=cut, scaled_by_row=False)
    errors = [
        (
            cases.moe.experts(x.cuda(), scores.cuda(), prepared, plan=plan).double().cpu() - wanted
        ).abs()
        for plan in (by_row, by_group)
    ]
    assert errors[0].mean() < 1.25 * errors[1].mean()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["plain", "channel", "blocks", "nvfp4"])
@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_a_shared_experts_output_is_added(kind, tokens, gated):
    from triton_kernel_cases_moe import check_shared

    check_shared("cuda", torch.bfloat16, kind, tokens, gated)
