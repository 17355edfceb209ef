"""A table of per-layer embeddings in host memory: kernels read its rows over the bus, in captured
steps too, and a model says what it says with the table on the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CASES, make_folder

from penstock import LLM, SamplingParams
from penstock.kernels.reference.elementwise import embedding as plain
from penstock.parallel.sharded_weight import Part
from penstock.quant.gathered import Gathered, pinned

pytestmark = pytest.mark.gpu

ROWS, WIDTH = 5000, 2 * 2048 + 72
ASK = SamplingParams(max_tokens=24, temperature=0.8, seed=4, n=3, ignore_eos=True, detokenize=False)
PROMPTS = [[40 + i * 7 % 90 for i in range(length)] for length in (20, 75, 33)]


@pytest.fixture(scope="module")
def table() -> torch.Tensor:
    """[ROWS, WIDTH] in host memory."""
    made = pinned((ROWS, WIDTH), torch.bfloat16)
    made.copy_(torch.randn(ROWS, WIDTH))
    return made


def test_rows_are_read_over_the_bus(table: torch.Tensor) -> None:
    from penstock.kernels.triton.elementwise.embedding import embed

    assert table.device.type == "cpu" and table.is_pinned()
    for count in (1, 7, 3000):
        ids = torch.randint(ROWS, (count,), device="cuda")
        for read in (embed, plain.embed):
            got = read(ids, table)
            assert got.device.type == "cuda" and torch.equal(got.cpu(), table[ids.cpu()])


def test_a_captured_step_reads_what_lies_there_then(table: torch.Tensor) -> None:
    """Ids that the device has drawn, numbers that were put there since."""
    from penstock.kernels.triton.elementwise.embedding import embed

    ids = torch.arange(64, device="cuda")
    embed(ids, table)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = embed(ids, table)
    for round_ in range(3):
        ids.copy_(torch.randint(ROWS, (64,), device="cuda"))
        torch.cuda.synchronize()
        table[11].fill_(float(round_))
        ids[5] = 11
        graph.replay()
        assert torch.equal(got.cpu(), table[ids.cpu()]) and bool((got[5] == round_).all())


def test_dummy_numbers_are_those_of_a_table_on_the_gpu() -> None:
    cuda, drawn = torch.device("cuda"), []
    for in_host in (False, True):
        weight = Gathered(Part("table", (9000, 2048)), torch.bfloat16, cuda, in_host=in_host)
        assert weight.value.is_cuda is not in_host
        with torch.inference_mode():
            weight.draw(torch.Generator(device=cuda).manual_seed(0), torch.bfloat16)
        drawn.append(weight.value.cpu())
    assert torch.equal(*drawn)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(
        CASES["gemma4 4/2 of 64 and 128, layers' own inputs"], tmp_path_factory.mktemp("gemma4")
    )


def opened(folder: Path, place: str, **knobs: Any) -> LLM:
    return LLM(
        str(folder),
        device="cuda",
        skip_tokenizer_init=True,
        kv_cache_tokens=1 << 16,
        max_num_seqs=64,
        per_layer_embeddings=place,
        **knobs,
    )


def said_by(llm: LLM) -> list[list[list[int]]]:
    return [
        [list(o.token_ids) for o in out.outputs]
        for out in llm.generate(PROMPTS, ASK, use_tqdm=False)
    ]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_model_says_the_same(
    folder: Path, load_format: str, capfd: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for place in ("gpu", "host"):
        with opened(folder, place, load_format=load_format) as llm:
            found[place], about = said_by(llm), llm.engine.runner.describe()
            assert about["graphs"]["sizes"] and ("host_bytes" in about) is (place == "host")
        assert ("lies in host memory, as asked" in capfd.readouterr().err) is (place == "host")
    assert found["gpu"] == found["host"]


def test_it_is_where_it_was_behind_a_sleep_and_other_weights(folder: Path) -> None:
    with opened(folder, "host") as llm:
        before = said_by(llm)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            if level == 2:
                llm.update_weights(str(folder))
            assert said_by(llm) == before, f"behind a sleep of level {level}"
        llm.update_weights(str(folder))  # into the arrays that captured steps know
        assert said_by(llm) == before and llm.engine.runner._model.table_in_host


def test_the_plain_column_reads_it_too(folder: Path) -> None:
    with opened(folder, "host", kernels="reference", dtype="float32") as llm:
        beside = said_by(llm)
    with opened(folder, "gpu", kernels="reference", dtype="float32") as llm:
        assert said_by(llm) == beside
