"""Float8 made from wide weights while they are loaded: llm-compressor's bytes, by rank, dummy, and
through LLM."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams

from penstock import LLM, SamplingParams
from penstock.demo import model_folder
from penstock.kernels.routing import Routing
from penstock.layers.maker import Maker
from penstock.layers.moe_maker import make_moe
from penstock.models.build_model import build_model
from penstock.models.read_config import read_model_config
from penstock.parallel.layout import Layout
from penstock.parallel.sharded_weight import Weight
from penstock.quant.choose import choose_schemes
from penstock.quant.fp8 import MadeFp8, to_fp8

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_bytes_are_llm_compressors(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    matrix = (torch.randn(64, 300, generator=draw) * torch.rand(64, 1, generator=draw)).to(dtype)
    matrix[3], matrix[5, 7] = 0, 40
    args = QuantizationArgs(
        num_bits=8,
        type=QuantizationType.FLOAT,
        strategy=QuantizationStrategy.CHANNEL,
        symmetric=True,
    )
    wanted, zero = calculate_qparams(
        matrix.amin(1, keepdim=True), matrix.amax(1, keepdim=True), args
    )
    numbers, scale = to_fp8(matrix)
    assert torch.equal(scale, wanted)
    stored = quantize(matrix, wanted, zero, args, dtype=torch.float8_e4m3fn)
    assert torch.equal(numbers.view(torch.uint8), stored.view(torch.uint8))


@pytest.mark.parametrize("cut", ["column", "row"])
def test_ranks_have_the_numbers_and_scales_of_the_whole(cut: str) -> None:
    matrix = torch.randn(32, 48, generator=torch.Generator().manual_seed(2))
    numbers, scale = to_fp8(matrix)
    schemes, found = choose_schemes("fp8"), []
    for rank in range(2):
        make = Maker(torch.float32, CPU, 1, Layout(rank, 2), schemes)
        linear = (
            make.column_linear([("a", 32, 2)], 48)
            if cut == "column"
            else make.row_linear("a", 32, 48, 2)
        )
        (weight,) = linear.weights()
        assert isinstance(weight, MadeFp8)
        (part, place), *_ = weight.places()
        weight.fill(part, place, matrix)
        found.append(weight.value.float() * weight.scale[:, None])
    worth = numbers.float() * scale
    assert torch.equal(torch.cat(found, 0 if cut == "column" else 1), worth)


def test_the_head_and_routers_stay_wide() -> None:
    make = Maker(torch.bfloat16, CPU, 1, scheme_of=choose_schemes("fp8"))
    kinds = {
        name: type(next(make.linear(name, 8, 16).weights()))
        for name in ("lm_head", "a.mlp.gate", "a.q_proj")
    }
    assert kinds == {"lm_head": Weight, "a.mlp.gate": Weight, "a.q_proj": MadeFp8}
    moe = make_moe(make, "a.mlp", 16, 8, 2, Routing(top_k=1, renormalise=True))
    assert [type(weight) for weight in moe.weights()] == [Weight, MadeFp8, MadeFp8]


def test_a_model_in_float8_takes_less_room_and_answers_alike_alone_and_together() -> None:
    prompts = [list(range(40 + i, 52 + 2 * i)) for i in range(4)]
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    answers = {}
    for quantization in ("auto", "fp8"):
        with LLM("demo", device="cpu", dtype="float32", quantization=quantization) as llm:
            answers[quantization] = [
                o.outputs[0].token_ids for o in llm.generate(prompts, greedy, use_tqdm=False)
            ]
            alone = [
                llm.generate([p], greedy, use_tqdm=False)[0].outputs[0].token_ids for p in prompts
            ]
            assert answers[quantization] == alone
    assert answers["auto"] != answers["fp8"]  # it is on: other numbers
    config = read_model_config(model_folder())
    sizes = [
        build_model(
            config, torch.bfloat16, torch.device("meta"), scheme_of=choose_schemes(quantization)
        ).weights_bytes
        for quantization in ("auto", "fp8")
    ]
    model = build_model(config, torch.bfloat16, torch.device("meta"))
    numbers = sum(matrix.numbers for block in model.blocks for matrix in block.matrices())
    # a byte less each, but for the scales
    assert 0 < numbers - (sizes[0] - sizes[1]) < numbers / 50
