"""The kernels of experts in Triton's interpreter, in float32, in small cases; the GPU tests sweep them."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter  # noqa: F401  (before the kernels)
import triton_kernel_cases_moe as cases

from penstock.kernels.triton import moe_one

pytestmark = pytest.mark.torch

SPANS = {
    "four": (192, 96), "int4": (192, 96), "int4 zeros": (128, 64), "int8": (192, 96), "int8 row zeros": (200, 72)
}  # fmt: skip
CPU, F32 = "cpu", torch.float32


@pytest.mark.parametrize("rows", [0, 16])
@pytest.mark.parametrize("shape", [(1, 5, 2), (40, 7, 3), (70, 64, 8)], ids=str)
def test_routes(rows, shape):
    tokens, count, top_k = shape
    cases.check_routes(CPU, tokens, count, top_k, rows, renormalise=tokens != 40)


@pytest.mark.parametrize(
    ("kind", "tokens"), [(k, t) for k in cases.KINDS for t in (1, 9, 40) if t != 9 or not k.startswith("int")]
)
def test_experts(kind, tokens):
    cases.check_experts(CPU, F32, kind, tokens, 5, *SPANS.get(kind, (200, 72)), 2)


@pytest.mark.parametrize("kind", ["plain", "channel", "blocks"])
def test_one_token_in_other_cuts(kind):
    of, gate_up, down = cases.made_experts(CPU, F32, kind, 3, 144, 40, 2, renormalise=False)
    assert moe_one.takes_one(of)
    x, scores = cases.drawn(1, 144, seed=3), cases.drawn(1, 3, seed=4)
    wanted, _ = cases.naive(x, scores, of, gate_up, down)
    routes = cases.moe_route.route(scores, 2, False, torch.zeros(3, dtype=torch.int32), 0)
    got = moe_one.one_token(x, routes, of, (moe_one.OneCut(4, 128, 1), moe_one.OneCut(8, 32, 2)))
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)


def test_one_token_of_others_is_nothing_special():
    for kind in ("four", "int4", "int8"):
        of, _, _ = cases.made_experts(CPU, F32, kind, 3, 64, 32, 1)
        assert not moe_one.takes_one(of)


def test_all_to_the_same_experts():
    of, _, _ = cases.made_experts(CPU, F32, "plain", 5, 40, 24, 2)
    plan = cases.small_plan(cases.moe.plan_of(40, of), 16)
    cases.check_experts(CPU, F32, "plain", 40, 5, 40, 24, 2, plan, cases.crowded(40, 5, 2))


def test_a_token_alone_gives_the_same_bits():
    cases.check_alone(CPU, F32, "channel", 20)


def test_no_tokens():
    of, _, _ = cases.made_experts(CPU, F32, "plain", 3, 16, 16, 1)
    assert cases.moe.experts(torch.empty(0, 16), torch.empty(0, 3), cases.moe.prepare_experts(of)).shape == (0, 16)
