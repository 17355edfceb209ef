"""Kernels of experts that a start compiles: none is missing for a step of another size."""

from __future__ import annotations

import pytest
import torch

from penstock.execute.padding import padded, padded_beside
from penstock.execute.warm import _CHUNK_TOKENS, _EXPERT_TOKENS, _kinds_of_sizes
from penstock.kernels.expert_matrix import ExpertMatrix, Experts
from penstock.kernels.routing import Routing
from penstock.kernels.triton.experts.moe import plan_of
from penstock.kernels.triton.pdl import early_of

pytestmark = pytest.mark.torch

MOST = 16_384
# experts and experts per token of Mixtral, gpt-oss-20b, Moonlight, GLM-4.7-Flash, Qwen3-30B-A3B,
# gpt-oss-120b, Qwen3.5-35B-A3B, Kimi K2, Qwen3-Next
SIZES = [(8, 2), (32, 4), (64, 6), (64, 4), (128, 8), (128, 4), (256, 8), (384, 8), (512, 10)]


@pytest.mark.parametrize("rows", [16, 256, 1024, 2048])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("eight", [False, True])
def test_every_plan_is_compiled_at_the_start(size, eight, rows, monkeypatch):
    monkeypatch.setattr("penstock.kernels.triton.pdl.has_pdl", lambda device: 1)
    count, top_k = size
    dtype = torch.float8_e4m3fn if eight else torch.bfloat16
    numbers = torch.empty((count, 256, 128), dtype=dtype, device="meta")
    matrix = ExpertMatrix(numbers, torch.empty((count, 256), device="meta") if eight else None)
    of = Experts(matrix, matrix, Routing(top_k=top_k, renormalise=True), torch.bfloat16)

    def kernels(tokens: int) -> set[object]:
        plan = plan_of(tokens, of)
        route, total = (early_of(numbers.device, n) for n in (tokens, 2 * tokens))
        return {plan, ("route", plan.sorted, route), ("sum", total)}

    steps = {padded(n) for n in range(1, rows + 1)} | set(range(16, MOST + 1, 16))
    chunks = (*_CHUNK_TOKENS, *_EXPERT_TOKENS, MOST)
    at_start = {padded_beside(0, min(n, MOST)).tokens for n in chunks}
    compiled = set().union(*(kernels(n) for n in (*_kinds_of_sizes(rows), *at_start)))
    assert set().union(*(kernels(n) for n in steps)) == compiled
