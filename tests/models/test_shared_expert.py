"""A shared expert beside the others: by the formula, whole and in two ranks' parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from penstock.kernels.choose import choose
from penstock.kernels.routing import Routing
from penstock.layers.maker import Maker
from penstock.layers.moe import Moe
from penstock.layers.moe_maker import make_moe, make_shared_expert
from penstock.parallel.layout import ALONE, Layout
from penstock.parallel.sharded_weight import Part, Weight
from penstock.quant.choose import choose_schemes

pytestmark = pytest.mark.torch

HIDDEN, INNER, SHARED, EXPERTS = 16, 8, 24, 4
CPU = torch.device("cpu")
ROUTING = Routing(top_k=2, renormalise=True, sigmoid=True, scale=1.7)


def made(layout: Layout, drawn: dict[str, Tensor], gate: str | None) -> Moe:
    make = Maker(torch.float32, CPU, 1, layout)
    shared = make_shared_expert(make, "a.shared_expert", HIDDEN, SHARED, gate=gate)
    correction = Part("a.gate.e_score_correction_bias", (EXPERTS,))
    moe = make_moe(make, "a", HIDDEN, INNER, EXPERTS, ROUTING, correction=correction, shared=shared)
    for weight in moe.weights():
        for part, place in weight.places():
            rng = torch.Generator().manual_seed(len(drawn))
            tensor = drawn.setdefault(part.name, torch.randn(part.shape, generator=rng) * 0.5)
            weight.fill(part, place, tensor)
    moe.prepare(choose(CPU, torch.float32))
    return moe


def formula(x: Tensor, drawn: dict[str, Tensor]) -> Tensor:
    """A token at a time, in float64."""
    w = {name.removeprefix("a."): tensor.double() for name, tensor in drawn.items()}

    def mlp(at: str, row: Tensor) -> Tensor:
        gate, up = (w[f"{at}.{n}_proj.weight"] @ row for n in ("gate", "up"))
        return w[f"{at}.down_proj.weight"] @ (silu(gate) * up)

    rows = []
    for row in x.double():
        worth = torch.sigmoid(w["gate.weight"] @ row)
        chosen = (worth + w["gate.e_score_correction_bias"]).topk(2).indices.tolist()
        weights = worth[chosen] / worth[chosen].sum() * 1.7
        out = sum(
            weight * mlp(f"experts.{expert}", row)
            for weight, expert in zip(weights, chosen, strict=True)
        )
        answer = mlp("shared_expert", row)
        if "shared_expert_gate.weight" in w:
            answer = answer * torch.sigmoid(w["shared_expert_gate.weight"] @ row)
        rows.append(out + answer)
    return torch.stack(rows)


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("gate", [None, "a.shared_expert_gate"])
def test_its_answer_is_added_whole_and_in_parts(gate: str | None, tokens: int) -> None:
    drawn: dict[str, Tensor] = {}
    ops, x = (
        choose(CPU, torch.float32),
        torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(99)),
    )
    whole = made(ALONE, drawn, gate=gate)
    wanted = formula(x, drawn)
    assert ("a.shared_expert_gate.weight" in drawn) is (gate is not None)
    torch.testing.assert_close(whole(ops, x).double(), wanted, rtol=1e-4, atol=1e-5)
    parts = [made(Layout(rank, 2), drawn, gate=gate)(ops, x) for rank in range(2)]
    torch.testing.assert_close(sum(parts).double(), wanted, rtol=1e-4, atol=1e-5)  # type: ignore[union-attr]
    assert (parts[0] - parts[1]).abs().max() > 0.1


def test_it_is_quantized_and_its_gate_is_not() -> None:
    make = Maker(torch.bfloat16, CPU, 1, scheme_of=choose_schemes("fp8"))
    shared = make_shared_expert(
        make, "a.shared_expert", HIDDEN, SHARED, gate="a.shared_expert_gate"
    )
    moe = make_moe(make, "a", HIDDEN, INNER, EXPERTS, ROUTING, shared=shared)
    assert [*moe.matrices()] == [shared.mlp.gate_up, shared.mlp.down]
    assert type(shared.gate) is Weight
    kinds = [type(weight).__name__ for weight in moe.weights()]
    assert kinds == ["Weight", *["MadeFp8"] * 4, "Weight"]
