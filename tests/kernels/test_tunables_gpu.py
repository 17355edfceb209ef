"""Every value that a tunable may have gives what its default gives, up to the order of sums."""

from __future__ import annotations

import pytest
import torch
from attention_cases import on, some, want
from kernels_naive import assert_close, attend, make_case
from latent_cases import kv_on, of_latents
from torch import Tensor

from penstock.kernels.choose import choose
from penstock.kernels.int_matrix import pack_four
from penstock.kernels.latent import LatentSizes
from penstock.kernels.ops import Ops
from penstock.kernels.tunables import TUNABLES, Tunable
from penstock.quant.fp4 import to_nvfp4

pytestmark = pytest.mark.gpu

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
CASES = [
    (tunable, value)
    for tunable in TUNABLES
    for value in tunable.candidates
    if value != tunable.default
]


def products(op: str, ops: Ops, rows: int) -> Tensor:
    draw = torch.Generator(CUDA).manual_seed(rows)
    x = torch.randn(rows, 1024, device=CUDA, dtype=BF16, generator=draw)
    weight = torch.randn(2048, 1024, device=CUDA, dtype=BF16, generator=draw) / 32
    if op == "linear":
        return ops.linear(x, ops.prepare_linear(weight), None)
    if op == "linear_fp8":
        scale = weight.abs().amax(1).float() / 448
        matrix = ops.prepare_linear_fp8(
            (weight.float() / scale[:, None]).to(torch.float8_e4m3fn), scale, BF16
        )
        form = matrix.form(rows)
        return ops.linear_fp8(x if form == "wide" else ops.quantize_rows(x, form), matrix, None)
    if op == "linear_fp4":
        numbers, scales, divisor = to_nvfp4(weight)
        whole = divisor.double().reciprocal().expand(len(weight))
        matrix = ops.prepare_linear_fp4(pack_four(numbers), scales, whole, BF16)
        form = matrix.form(rows)
        return ops.linear_fp4(x if form == "wide" else ops.quantize_rows(x, form), matrix, None)
    scale = weight.abs().amax(1, keepdim=True) / 127
    matrix = ops.prepare_linear_int((weight / scale).round().to(torch.int8), scale, None, BF16)
    return ops.linear_int(x, matrix, None)


@pytest.mark.parametrize(
    ("tunable", "value"), CASES, ids=lambda each: getattr(each, "name", str(each))
)
def test_a_value_changes_no_answer(tunable: Tunable, value: int) -> None:
    usual, tuned = choose(CUDA, BF16), choose(CUDA, BF16, tuned={tunable.name: value})
    assert getattr(tuned, tunable.op) is not getattr(usual, tunable.op)
    if tunable.op == "attention":
        for rows in (1, 5, 40, 130):
            case = make_case([1 + 37 * row % 1500 for row in range(rows)], dtype=BF16, seed=rows)
            there, tokens = on(case, "cuda"), some(case, 20)
            found = attend(tuned, there.q, there.kv, there.inputs, there.scale).cpu()
            assert_close(found[tokens], want(case, tokens))
        return
    if tunable.op == "latent_attention":
        for tokens in (40, 100, 200, 300, 700, 1100):
            case = make_case([33], chunks=[(0, tokens)], heads=16, kv_heads=1, width=16)
            step = of_latents(case, LatentSizes(rank=512, turning=64, still=128, value=128), BF16)
            there, kv, up = on(step.case, "cuda"), kv_on(step.kv, "cuda"), step.up.cuda()
            expected, found = (
                ops.latent_attention(
                    there.q,
                    up,
                    kv,
                    there.inputs,
                    step.kind,
                    ops.plan(there.inputs, step.kind, there.q, BF16),
                ).float()
                for ops in (usual, tuned)
            )
            assert (found - expected).abs().max() <= 0.02 * expected.abs().max()
        return
    for rows in (1, 3, 8, 16, 17, 48, 64, 100, 128, 200, 256, 300, 600):
        expected, found = products(tunable.op, usual, rows), products(tunable.op, tuned, rows)
        assert (found.float() - expected.float()).abs().max() <= 0.02 * expected.float().abs().max()
