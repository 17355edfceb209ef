"""Integers made from wide weights, and words of them, against compressed-tensors' own functions,
byte by byte: numbers and scales (`calculate_qparams`, `quantize`), words (`pack_to_int32`), and
what its compressor reads out of what our tests write by hand. By rank, dummy, and through LLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import (
    PackedQuantizationCompressor,
    pack_to_int32,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationType
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from quantized_forms import packed

from penstock import LLM, SamplingParams
from penstock.config import Quantization
from penstock.errors import UsageError
from penstock.kernels.choose import choose
from penstock.kernels.int_matrix import unpack_four
from penstock.layers.maker import Maker
from penstock.models.decoder import Decoder
from penstock.parallel.layout import Layout
from penstock.quant.choose import choose_schemes
from penstock.quant.int_forms import unpack_words
from penstock.quant.integers import MadeInt, to_int
from penstock.weights.load import load_model

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def args_of(bits: int, group: int | None, symmetric: bool = True) -> QuantizationArgs:
    strategy = "channel" if group is None else "group"
    return QuantizationArgs(
        num_bits=bits,
        type=QuantizationType.INT,
        strategy=strategy,
        symmetric=symmetric,
        group_size=group or -1,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits, group", [(8, None), (4, 128), (4, 32)])
def test_made_numbers_are_compressed_tensors_bytes(
    dtype: torch.dtype, bits: int, group: int | None
) -> None:
    draw = torch.Generator().manual_seed(1)
    matrix = (torch.randn(64, 256, generator=draw) * torch.rand(64, 1, generator=draw)).to(dtype)
    matrix[3], matrix[5, 7] = 0, 40
    args, groups = args_of(bits, group), matrix.unflatten(1, (-1, group or 256))
    wanted, zero = calculate_qparams(groups.amin(2), groups.amax(2), args)
    numbers, scale = to_int(matrix, bits, group or 256, dtype)
    assert scale.dtype == dtype and torch.equal(scale, wanted)
    assert torch.equal(numbers, quantize(matrix, wanted, zero, args, dtype=torch.int8))


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_compressed_tensors_bytes_both_ways(bits: int) -> None:
    least = -(2 ** (bits - 1))
    numbers = torch.randint(least, -least, (24, 96), generator=torch.Generator().manual_seed(1)).to(
        torch.int8
    )
    words = pack_to_int32(numbers, bits)
    assert torch.equal(unpack_words(words, bits).int() + least, numbers.int())


@pytest.mark.parametrize("bits, symmetric", [(4, True), (4, False), (8, True), (8, False)])
def test_what_our_tests_write_by_hand_is_what_the_library_reads(bits: int, symmetric: bool) -> None:
    stored, worth = packed(16, 96, 32, 5, bits=bits, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args_of(bits, 32, symmetric))
    read = PackedQuantizationCompressor.decompress(stored, scheme)["weight"]
    # it rounds to its scales' bfloat16
    assert (read.float() - worth).abs().max() <= worth.abs().max() * 2**-8


@pytest.mark.parametrize("made, bits", [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize("cut", ["column", "row"])
def test_ranks_have_the_numbers_and_scales_of_the_whole(made: str, bits: int, cut: str) -> None:
    matrix = torch.randn(32, 1024, generator=torch.Generator().manual_seed(2))
    group = 1024 if bits == 8 else 128
    numbers, scale = to_int(matrix, bits, group, torch.float32)
    worth, found = numbers.float() * scale.repeat_interleave(group, 1), []
    for rank in range(2):
        make = Maker(torch.float32, CPU, 1, Layout(rank, 2), choose_schemes(made))  # type: ignore[arg-type]
        linear = (
            make.column_linear([("a", 32, 2)], 1024)
            if cut == "column"
            else make.row_linear("a", 32, 1024, 2)
        )
        (weight,) = linear.weights()
        assert isinstance(weight, MadeInt)
        ((part, place),) = weight.places()
        weight.fill(part, place, matrix)
        whole = weight.value.float() if bits == 8 else unpack_four(weight.value).float() - 8
        found.append(
            whole * weight.scale.repeat_interleave(whole.shape[1] // weight.scale.shape[1], 1)
        )
        assert linear.numbers == matrix.numel() // 2
    assert torch.equal(torch.cat(found, 0 if cut == "column" else 1), worth)


def test_a_tied_head_is_made_of_the_table_which_stays(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 48,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    ops = choose(CPU, torch.float32)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))

    def loaded(kind: Quantization) -> Decoder:
        return load_model(
            tmp_path,
            load_format="dummy",
            dtype=torch.float32,
            device=CPU,
            ops=ops,
            seed=0,
            quantization=kind,
        )

    for kind in ("int8", "int4"):
        model = loaded(kind)
        numbers, scale = to_int(model.embedding.table.value, 8, 64, torch.float32)
        torch.testing.assert_close(model.logits(hidden), hidden @ (numbers.float() * scale).T)
    model = loaded("fp8")
    # float8 leaves the head
    torch.testing.assert_close(model.logits(hidden), hidden @ model.embedding.table.value.T)


def test_rows_that_groups_cannot_divide_are_refused() -> None:
    make = Maker(torch.float32, CPU, 1, scheme_of=choose_schemes("int4"))
    with pytest.raises(
        UsageError,
        match=r"a has 48 inputs, which groups of 32 don't divide.*take --quantization int8",
    ):
        make.linear("a", 8, 48)
    ranks = Maker(torch.float32, CPU, 1, Layout(0, 4), choose_schemes("int4"))
    with pytest.raises(
        UsageError, match="a has 10 groups of 128 inputs, which 4 ranks cannot divide"
    ):
        ranks.row_linear("a", 8, 1280, 4)


@pytest.mark.parametrize(
    ("into", "group"), [(1024, 128), (768, 128), (832, 64), (864, 32), (640, 32), (64, 32)]
)
def test_rows_have_the_largest_group_that_divides_them_and_short_ones_the_smallest(
    into: int, group: int
) -> None:
    make = Maker(torch.float32, CPU, 1, scheme_of=choose_schemes("int4"))
    (weight,) = make.linear("a", 8, into).weights()
    assert isinstance(weight, MadeInt) and weight.scale.shape == (8, into // group)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_model_in_integers_answers_alike_alone_and_together(
    dtype: str, quantization: str
) -> None:
    prompts = [list(range(40 + i, 52 + 2 * i)) for i in range(4)]
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    score = SamplingParams(max_tokens=1, temperature=0, logprobs=1)
    with LLM("demo", device="cpu", dtype=dtype, quantization=quantization) as llm:
        answers = [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, use_tqdm=False)]
        scores = [
            o.outputs[0].cumulative_logprob for o in llm.generate(prompts, score, use_tqdm=False)
        ]
        alone = [llm.generate([p], greedy, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
    assert answers == alone
    with LLM("demo", device="cpu", dtype=dtype) as llm:
        wide = [
            o.outputs[0].cumulative_logprob for o in llm.generate(prompts, score, use_tqdm=False)
        ]
    # it is on: other numbers, not by much
    assert scores != wide and scores == pytest.approx(wide, abs=0.6)
