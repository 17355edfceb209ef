"""Canaries: requests whose every token can come from their own prompt alone, many at once, on the
CPU's engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import bad_logits_cases
import pytest
import torch
from canary_drive import Flock
from canary_hybrid import make_hybrid
from canary_model import make_folder
from safetensors.torch import load_file, save_file

from penstock import LLM
from penstock.kernels.state_forms import LatentKv

pytestmark = pytest.mark.torch

KNOBS = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_num_seqs": 48,
    "max_model_len": 512,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("canary"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("canary_of_experts"), experts=True)


@pytest.mark.parametrize(
    "knobs",
    [{"steps_ahead": 1}, {"prefix_groups": "off", "steps_ahead": 2}, {"kv_cache_dtype": "fp8"}],
    ids=str,
)
def test_no_foreign_token(folder: Path, knobs: dict[str, object]) -> None:
    nothing_foreign(folder, knobs)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hybrid(tmp_path_factory.mktemp("canary_of_states"))


def test_no_foreign_token_by_states(hybrid: Path) -> None:
    nothing_foreign(hybrid, {"steps_ahead": 1, "mamba_ssm_cache_dtype": "bfloat16"})


def test_the_canary_of_states_dies_of_a_foreign_state(hybrid: Path) -> None:
    """Rows' states change places once, between two steps, and their keys and values don't."""
    flock = Flock.of(12, seed=2, leaving=0)
    with LLM(str(hybrid), **KNOBS, kv_cache_tokens=8000) as llm:
        runner, rows = llm.engine.runner, llm.engine.scheduler.rows
        views = runner._state.kv.layers[0][0]  # type: ignore[attr-defined]

        def turn() -> None:
            for part in views.values():
                part[: rows.count] = part[: rows.count].roll(rows.count // 2, 0)

        def meddle(step: int) -> None:
            if step == 12:
                assert rows.count > 3
                runner._executor.call(turn)  # type: ignore[attr-defined]  # behind the steps that are on their way

        flock.fly(llm, meddle)
    assert flock.wrong


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("canary_of_latents"), latent=True)


@pytest.mark.parametrize("knobs", [{"steps_ahead": 1}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_no_foreign_token_by_latents(latents: Path, knobs: dict[str, object]) -> None:
    nothing_foreign(latents, knobs)


@pytest.mark.parametrize("knobs", [{}, {"quantization": "fp8"}], ids=str)
def test_no_foreign_token_by_experts(experts: Path, knobs: dict[str, object]) -> None:
    nothing_foreign(experts, knobs)


def nothing_foreign(folder: Path, knobs: dict[str, object]) -> None:
    """Few blocks, rows preempted all the time, most requests to be cancelled if they last."""
    flock = Flock.of(28, seed=7, leaving=0.8)
    with LLM(str(folder), **(KNOBS | {"kv_cache_tokens": 2000, "preempt_every": 4} | knobs)) as llm:
        flock.fly(llm)
        stats = llm.stats()
    assert not flock.wrong, flock.wrong[:3]
    assert flock.left > 3 and stats["preemptions"] > 10 and stats["prefix_hit_tokens"] > 0
    assert (flock.grouped > 0) is ("prefix_groups" not in knobs)


def test_the_canary_of_experts_dies_of_another_expert(experts: Path, tmp_path: Path) -> None:
    """Its routers send tokens to those whose codes are turned round."""
    wrong = shutil.copytree(experts, tmp_path / "wrong")
    named = load_file(wrong / "model.safetensors")
    routers = {
        name: weight.roll(len(weight) // 2, 0)
        for name, weight in named.items()
        if name.endswith("moe.gate.weight")
    }
    assert len(routers) == 2
    save_file(named | routers, wrong / "model.safetensors", metadata={"format": "pt"})
    flock = Flock.of(12, seed=2, leaving=0)
    with LLM(str(wrong), **KNOBS, kv_cache_tokens=8000) as llm:
        flock.fly(llm)
    assert flock.wrong


@pytest.mark.parametrize("of", ["folder", "latents"])
def test_the_canary_dies_of_a_foreign_block(of: str, request: pytest.FixtureRequest) -> None:
    """Two blocks of different prompts change places once: somebody must say something wrong."""
    folder: Path = request.getfixturevalue(of)
    flock = Flock.of(12, seed=2, leaving=0)
    with LLM(str(folder), **KNOBS, kv_cache_tokens=8000) as llm:
        kv = llm.engine.runner._state.kv  # type: ignore[attr-defined]
        rows = llm.engine.scheduler.rows

        def swap(step: int) -> None:
            if step == 12:
                live = [row for row in range(rows.count) if rows.blocks[row] - rows.shared[row] > 1]
                a, b = (int(rows.table[row, rows.shared[row]]) for row in (live[0], live[-1]))
                assert a != b
                for (layer,) in kv.layers:
                    held = layer.latent if isinstance(layer, LatentKv) else layer.storage
                    held[[a, b]] = held[[b, a]]

        with torch.inference_mode():
            flock.fly(llm, swap)
    assert flock.wrong


@pytest.mark.parametrize(
    "check", [bad_logits_cases.check_prompt, bad_logits_cases.check_own_blocks]
)
def test_blocks_of_bad_logits_are_cleared_and_never_found(
    folder: Path, check: Callable[..., None]
) -> None:
    check(folder, device="cpu")
