"""Attention over latent vectors: both columns against fp64, groups, rows that are split, chunks; Triton's in its
interpreter. What is stored is the normed vector and the turned key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton_interpreter  # noqa: F401  (before the kernels)
from attention_cases import MIXED, of_columns
from kernels_naive import make_case
from latent_cases import of_latents, right
from torch import Tensor

from penstock.kernels.inputs import StepInputs
from penstock.kernels.reference import attention as planned_plain
from penstock.kernels.reference import latent as plain
from penstock.kernels.triton import attention as planned
from penstock.kernels.triton import latent as triton

pytestmark = pytest.mark.torch

CASES: dict[str, dict[str, Any]] = {
    "rows alone": {"lengths": [1, 15, 16, 17, 64, 65]},
    "one row, split": {"lengths": [203], "heads": 2},
    "chunks": {"lengths": [], "chunks": [(0, 1), (0, 40), (33, 2), (0, 0)]},
    "groups and chunks": MIXED,
    "many empty groups": {**MIXED, "groups": [(0, 16), (2, 0), (0, 32), (3, 32), (0, 0)]},
    "long prefixes, in parts": {"lengths": [420, 401, 300, 289, 291, 17], "groups": [(2, 400), (3, 288)]},
    "20 heads": {**MIXED, "heads": 20},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("rank", "turning"), [(32, 8), (24, 16)])
def test_what_heads_see(name: str, rank: int, turning: int) -> None:
    shape = {"heads": 4, "kv_heads": 1, "width": 16} | CASES[name] | {"kv_heads": 1, "width": 16}
    case, kv, kind = of_latents(make_case(**shape), rank, turning)
    if case.inputs.decode is not None:
        case = of_columns(case)
    wanted, cos_sin = right(case, kv, kind.scale), torch.zeros(1024, 2, turning // 2)
    for plan, attend in ((planned_plain.plan, plain.latent_attention), (planned.plan, triton.latent_attention)):
        inputs: StepInputs = case.inputs
        out = attend(case.q, kv, inputs, kind, plan(inputs, kind, cos_sin, torch.float32))
        torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("column", [plain, triton], ids=["reference", "triton"])
def test_what_is_stored(column: Any) -> None:
    case, kv, kind = of_latents(make_case(**MIXED, heads=4, kv_heads=1, width=16), 32, 8)
    inputs, draw = case.inputs, torch.Generator().manual_seed(4)
    angles = torch.rand(1024, 4, generator=draw) * 6
    cos_sin = torch.stack((angles.cos(), angles.sin()), 1)
    tokens = len(case.positions)
    given, q = torch.randn(tokens, 40, generator=draw), torch.randn(tokens, 4, 20, generator=draw)
    norm, before, asked = torch.rand(32, generator=draw) + 0.5, kv.latent.clone(), q.clone()
    plan = (planned_plain if column is plain else planned).plan(inputs, kind, cos_sin, torch.float32)
    column.latent_store(given, q, norm, 1e-6, cos_sin, inputs, kv, plan)

    def turned(x: Tensor, position: int) -> Tensor:
        """x [..., 8]: a pair's first number stands in the first half."""
        cos, sin = cos_sin[position]
        return torch.cat((x[..., :4] * cos - x[..., 4:] * sin, x[..., 4:] * cos + x[..., :4] * sin), -1)

    for token, slot in enumerate(inputs.slots.tolist()):
        vector = given[token, :32] / (given[token, :32].square().mean() + 1e-6).sqrt() * norm
        stored = torch.cat((vector, turned(given[token, 32:], case.positions[token])))
        torch.testing.assert_close(kv.latent.view(-1, 40)[slot], stored, rtol=1e-5, atol=1e-5)
        before.view(-1, 40)[slot] = stored
        torch.testing.assert_close(q[token, :, 12:], turned(asked[token, :, 12:], case.positions[token]))
    torch.testing.assert_close(kv.latent, before, rtol=1e-5, atol=1e-5)
    assert torch.equal(q[:, :, :12], asked[:, :, :12])
