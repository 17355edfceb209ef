"""The kernels of experts in Triton's interpreter, in float32, in small cases; the GPU tests sweep
them."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter  # noqa: F401  (before the kernels)
import triton_kernel_cases_moe as cases

from penstock.kernels.fixed_row import to_fixed
from penstock.kernels.routing import Routing
from penstock.kernels.triton.experts import moe_four, moe_one
from penstock.kernels.triton.linear.linear_four import Band

pytestmark = pytest.mark.torch

SPANS = {
    "four": (192, 96),
    "nvfp4": (192, 96),
    "int4": (192, 96),
    "int4 zeros": (128, 64),
    "int8": (192, 96),
    "int8 row zeros": (200, 72),
}
CPU, F32 = "cpu", torch.float32


def spans(kind: str, tokens: int) -> tuple[int, int]:
    """Hidden size and inner size of a case: one token's kernel of four-bit floats is slow here, and
    is seen with longer rows below."""
    one = tokens == 1 and kind in ("four", "nvfp4")
    return (96, 32) if one else SPANS.get(kind, (200, 72))


@pytest.mark.parametrize("rows", [0, 16, 64])
@pytest.mark.parametrize("shape", [(1, 5, 2), (40, 7, 3), (70, 64, 8)], ids=str)
def test_routes(rows, shape):
    tokens, count, top_k = shape
    cases.check_routes(CPU, tokens, count, Routing(top_k=top_k, renormalise=tokens != 40), rows)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (2, 1), (3, 2), (6, 6)], ids=str)
def test_routes_of_every_kind(groups, sigmoid, corrected):
    """Groups that are no power of two, of as many experts that are none."""
    rest = {"added": 0.1} if sigmoid else {"least": 0.4}
    by = Routing(
        top_k=3,
        renormalise=True,
        sigmoid=sigmoid,
        groups=groups[0],
        kept_groups=groups[1],
        scale=2.5,
        **rest,
    )
    cases.check_routes(CPU, 30, 18, by, 16, corrected)


def test_routes_that_are_not_renormalised_are_scaled():
    cases.check_routes(
        CPU, 20, 12, Routing(top_k=2, renormalise=False, sigmoid=True, scale=0.5), 0, True
    )


def test_a_correction_chooses_and_does_not_weigh():
    """By hand: three experts worth 0.5, 0.73 and 0.88; what is added to the first puts it in the
    last's place."""
    scores, correction = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([0.5, 0.0, -0.5])
    by = Routing(top_k=2, renormalise=True, sigmoid=True, scale=3.0)
    got = cases.moe_route.route(scores, by, torch.zeros(3, dtype=torch.int32), 0, correction)
    first, second = 0.5, 0.7310585786300049
    wanted = torch.tensor([[first, second]]) / (first + second) * 3.0
    for weights, chosen in ((got.weights, got.chosen), cases.plain.route(scores, by, correction)):
        assert chosen.tolist() == [[0, 1]]
        torch.testing.assert_close(weights, wanted)


def test_a_group_counts_what_its_two_best_are_worth():
    """By hand: the best of all stands beside nothing, so that two middling ones of another group
    come first."""
    worth = torch.tensor([[0.9, 0.01, 0.02, 0.6, 0.5, 0.03]])
    by = Routing(top_k=2, renormalise=False, sigmoid=True, groups=2, kept_groups=1)
    scores = torch.logit(worth)
    got = cases.moe_route.route(scores, by, torch.zeros(6, dtype=torch.int32), 0)
    for weights, chosen in ((got.weights, got.chosen), cases.plain.route(scores, by)):
        assert chosen.tolist() == [[3, 4]]
        torch.testing.assert_close(weights, torch.tensor([[0.6, 0.5]]))


@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_whose_router_has_a_correction(tokens):
    cases.check_experts(CPU, F32, "plain", tokens, 5, 40, 24, 2, corrected=True)


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [(k, t) for k in cases.KINDS for t in (1, 9, 40) if t != 9 or not k.startswith("int")],
)
def test_experts(kind, tokens):
    cases.check_experts(CPU, F32, kind, tokens, 5, *spans(kind, tokens), 2)


@pytest.mark.parametrize("kind", ["channel", "group"])
def test_experts_of_more_rows_than_are_paired_scale_the_input_of_down_by_row(kind):
    of, _, _ = cases.made_experts(CPU, F32, kind, 2, 136, 72, 2)
    assert cases.moe.plan_of(17, of).scaled_by_row and not cases.moe.plan_of(16, of).scaled_by_row
    cases.check_experts(CPU, F32, kind, 100, 2, 136, 72, 2)


# The first three and four-bit floats have kernels for one token; integers' kernels take any number.
@pytest.mark.parametrize(
    "kind, tokens",
    [
        *((kind, 1) for kind in ("plain", "channel", "blocks", "four", "nvfp4")),
        *((kind, 9) for kind in ("plain", "blocks", "int4 zeros", "four", "nvfp4")),
    ],
)
def test_experts_without_a_gate(kind, tokens):
    cases.check_experts(CPU, F32, kind, tokens, 5, *spans(kind, tokens), 2, gate="none")


@pytest.mark.parametrize(
    "kind, tokens", [("plain", 1), ("plain", 9), ("channel", 1), ("nvfp4", 1), ("int4 zeros", 9)]
)
def test_experts_gated_by_gelu_whose_answers_are_scaled(kind, tokens):
    cases.check_experts(
        CPU, F32, kind, tokens, 5, *spans(kind, tokens), 2, gate="gelu_tanh", scaled=True
    )


@pytest.mark.parametrize("kind", ["plain", "channel", "blocks"])
def test_one_token_in_other_cuts(kind):
    of, gate_up, down = cases.made_experts(CPU, F32, kind, 3, 144, 40, 2, renormalise=False)
    assert moe_one.takes_one(of)
    x, scores = cases.drawn(1, 144, seed=3), cases.drawn(1, 3, seed=4)
    wanted, _ = cases.naive(x, scores, of, gate_up, down)
    routes = cases.moe_route.route(scores, of.routing, torch.zeros(3, dtype=torch.int32), 0)
    got = moe_one.one_token(
        x, routes, of, cuts=(moe_one.OneCut(4, 128, 1), moe_one.OneCut(8, 32, 2))
    )
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind, gate", [("four", "silu"), ("nvfp4", "none")])
@pytest.mark.parametrize("chunks", [2, 4])
def test_one_token_of_four_bit_floats_in_other_bands(kind, gate, chunks):
    """9 chunks of the row, 3 of what is between the products, in several iterations, of which the
    last is not full; outputs that don't fill the last program."""
    of, gate_up, down = cases.made_experts(CPU, F32, kind, 3, 288, 96, 2, gate=gate)
    of = cases.moe.prepare_experts(of).of
    x, scores = cases.drawn(1, 288, seed=3), cases.drawn(1, 3, seed=4)
    wanted, size = cases.naive(x, scores, of, gate_up, down)
    routes = cases.moe_route.route(scores, of.routing, torch.zeros(3, dtype=torch.int32), 0)
    bands = Band(64, chunks, 1, 1), Band(128, chunks, 1, 1)
    got = moe_four.one_token_of_four(to_fixed(x), routes, of, bands)
    assert ((got.double() - wanted).abs() <= size * 2.0**-13 + 1e-5).all()


def test_which_experts_have_kernels_for_one_token():
    for kind in cases.KINDS:
        of, _, _ = cases.made_experts(CPU, F32, kind, 3, 256, 256, 1)
        assert moe_one.takes_one(of) == (kind in ("plain", "channel", "blocks")), kind
        assert moe_four.takes_four(of) == (kind in ("four", "nvfp4")), kind


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "kind, tokens", [("plain", 1), ("plain", 9), ("channel", 40), ("nvfp4", 1)]
)
def test_a_shared_experts_output_is_added(kind, tokens, gated):
    cases.check_shared(CPU, F32, kind, tokens, gated)


def test_all_to_the_same_experts():
    of, _, _ = cases.made_experts(CPU, F32, "plain", 5, 40, 24, 2)
    plan = cases.small_plan(cases.moe.plan_of(40, of), 16)
    cases.check_experts(CPU, F32, "plain", 40, 5, 40, 24, 2, plan, cases.crowded(40, 5, 2))


def test_a_token_alone_gives_the_same_bits():
    cases.check_alone(CPU, F32, "channel", 20)


def test_no_tokens():
    of, _, _ = cases.made_experts(CPU, F32, "plain", 3, 16, 16, 1)
    assert cases.moe.experts(
        torch.empty(0, 16), torch.empty(0, 3), cases.moe.prepare_experts(of)
    ).shape == (0, 16)
