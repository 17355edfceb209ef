"""benchmarks/shapes.py at tiny size: the models it writes, what it computes of steps, and a run
from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import shapes
from alike_sizes import alike_sizes
from at_length import at_length
from random_model import SHAPES, load_format, tensors, write_model
from step_limit import Machine
from step_parts import COLUMN, ELEMENTWISE, FAMILIES, part_of_kernel
from step_watch import Watch

from penstock.demo import model_folder
from penstock.engine.roofline import limit_seconds
from penstock.llm import LLM
from penstock.models.generation_config import end_ids, read_generation_defaults
from penstock.models.read_config import read_model_config
from penstock.request import SamplingParams
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

TINY = SHAPES["tiny"]
KNOBS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 32, "kv_cache_tokens": 8192}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_model(TINY, folder, weights=True)
    return folder


# --- the model's folder


@pytest.mark.parametrize(
    ("name", "parameters"), [("llama-3.2-1b", 1_235_814_400), ("llama-3-8b", 8_030_261_248)]
)
def test_shapes_have_the_real_models_size(name: str, parameters: int) -> None:
    """The counts of meta-llama's own checkpoints."""
    assert sum(int(np.prod(size)) for _, size in tensors(SHAPES[name])) == parameters


def test_the_folder_is_read_as_any_model(folder: Path) -> None:
    config = read_model_config(folder)
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (
        TINY.hidden,
        TINY.layers,
        TINY.vocab,
    )
    ends = end_ids(config, read_generation_defaults(folder))
    assert len(ends) == TINY.ends and len(set(ends)) == TINY.ends and max(ends) < TINY.vocab
    assert load_format(folder) == "auto"
    with LLM(str(folder), **KNOBS) as llm:
        out = llm.generate(
            ["Question: "], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False
        )
    assert len(out[0].outputs[0].token_ids) == 5


def test_the_tokenizer_is_filled_up_and_still_encodes_as_before(folder: Path) -> None:
    filled, demo = Tokenizer.load(folder), Tokenizer.load(model_folder())
    text = "Question: Anna has 12 apples.\nAnswer:"
    assert filled.vocab_size == TINY.vocab and filled.encode(text) == demo.encode(text)
    assert all(filled.decode([token]) for token in range(demo.vocab_size, TINY.vocab))


# --- steps


class Asking:
    """A runner that is only asked."""

    num_blocks = 7

    def answer(self) -> int:
        return 42


def test_watch_counts_what_ran(folder: Path) -> None:
    """A group of 6 samples on a prompt of 40 tokens: 2 blocks are shared, and no token is computed
    and not counted."""
    with LLM(str(folder), **KNOBS, steps_ahead=0) as llm:
        watch = llm.engine.runner = Watch(llm.engine.runner)
        params = SamplingParams(n=6, max_tokens=4, ignore_eos=True)
        llm.generate([list(range(100, 140))], params, use_tqdm=False)
    steps = watch.steps.columns()
    assert steps["chunk"].sum() == 39 and steps["chunk_pairs"].sum() == 39 * 40 / 2
    assert steps["rows"].sum() == 6 * 4
    tokens_read = steps["own"] + steps["shared_pairs"]
    assert tokens_read.sum() == 6 * (40 + 41 + 42 + 43)
    assert Watch(Asking()).answer() == 42  # type: ignore[arg-type]


def test_the_limit_is_the_sum_of_its_terms() -> None:
    kv = 2 * TINY.layers * TINY.kv_heads * TINY.head_dim
    told = {
        field: getattr(TINY, field) for field in ("layers", "hidden", "heads", "head_dim", "vocab")
    }
    sizes = alike_sizes(**told, layer_weights=TINY.layer_weights, kv_numbers=kv)
    numbers = TINY.layer_weights, TINY.hidden * TINY.vocab
    machine = Machine("cpu", 2, 1e9, (1, 100), (1e-4, 1e-3), (2e-4, 1e-2), *numbers)
    names = ("rows", "own", "shared", "shared_pairs", "chunk", "chunk_pairs", "chunk_context")
    steps = dict.fromkeys(names, np.zeros(1))
    assert limit_seconds(steps, sizes, machine) == 0.0
    many = steps | {"rows": np.array([100.0])}
    stored = 100 * (kv + TINY.vocab) * 2 / 1e9
    assert limit_seconds(many, sizes, machine) == pytest.approx(TINY.layers * 1e-3 + 1e-2 + stored)
    wider = replace(sizes, layer_weights=3 * sizes.layer_weights)
    assert limit_seconds(many, wider, machine) == pytest.approx(TINY.layers * 3e-3 + 1e-2 + stored)
    assert limit_seconds(many, sizes, machine.shared_by(2)) == pytest.approx(
        limit_seconds(many, sizes, machine)
    )
    read = many | {"own": np.array([1e6])}
    gained = limit_seconds(read, sizes, machine) - limit_seconds(many, sizes, machine)
    assert gained == pytest.approx(1e6 * kv * 2 / 1e9)
    pairs = many | {"shared_pairs": np.array([1e6])}
    gained = limit_seconds(pairs, sizes, machine) - limit_seconds(many, sizes, machine)
    assert gained == pytest.approx(
        1e6 * 4 * TINY.heads * TINY.head_dim * TINY.layers / machine.best_rate
    )


# --- parts


def test_every_kernel_has_a_part() -> None:
    """The parts follow the families of the column of kernels."""
    families = {path.name for path in COLUMN.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert families == FAMILIES.keys()
    assert all(any(COLUMN.glob(f"*/{name}.py")) for name in ELEMENTWISE)
    part_of = part_of_kernel()
    assert [
        part_of(name) for name in ("_own", "_prefix", "_join", "_linear_small", "_rotary_and_store")
    ] == [
        "attention",
        "attention",
        "attention",
        "products",
        "elementwise",
    ]


# --- all of it


@at_length
def test_a_run_gathers_its_rows_and_tells_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "--shape",
        "tiny",
        "--out",
        str(tmp_path),
        *(f"--knob={name}={value}" for name, value in KNOBS.items()),
    ]
    assert shapes.main([*words, "--work", "one"]) == 0
    monkeypatch.setattr(shapes, "in_a_process", lambda call, *arguments: call(*arguments))
    assert shapes.main([*words, "--work", "monkeys-stops"]) == 0
    # holds no sequence
    assert shapes.main([*words, "--work", "big", "--knob", "kv_cache_tokens=100"]) == 1
    found = json.loads((tmp_path / "results.json").read_text())
    assert set(found) == {"one", "monkeys-stops", "big"}
    assert found["one"]["output_tokens"] == found["one"]["steps"] == 64
    assert found["one"]["thrown_away_percent"] == 0.0 and 0 < found["one"]["limit_percent"] < 100
    assert sum(found["one"]["parts_ms"].values()) == pytest.approx(
        found["one"]["step_ms"], rel=1e-6
    )
    assert "kv_cache_tokens (100) holds no" in found["big"]["failed"]
    table = capsys.readouterr().out.splitlines()[-3:]
    assert {line.split()[0] for line in table} == set(found)
