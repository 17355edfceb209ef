"""Two thousand requests at once on the GPU, each answerable from its own prompt alone: no foreign
token, whatever is cancelled, preempted, grouped or replayed. And what becomes of blocks after
logits that were not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bad_logits_cases
import pytest
import torch
from canary_drive import Flock
from canary_hybrid import make_hybrid
from canary_model import make_folder

from penstock import LLM, SamplingParams

pytestmark = pytest.mark.gpu

KNOBS: dict[str, Any] = {
    "device": "cuda",
    "skip_tokenizer_init": True,
    "max_model_len": 512,
    "prefix_groups": "always",
    "kv_cache_tokens": 1_000_000,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("canary"))


@pytest.mark.parametrize(
    "knobs",
    [
        {"dtype": "bfloat16", "max_num_seqs": 4096, "preempt_every": 1},  # all of them run at once
        {
            "dtype": "float32",
            "max_num_seqs": 2048,
            "kv_cache_tokens": 40_000,
            "preempt_every": 2,
            "steps_ahead": 3,
        },
        {"dtype": "bfloat16", "max_num_seqs": 512, "prefix_groups": "off", "preempt_every": 3},
        {
            "dtype": "bfloat16",
            "max_num_seqs": 1024,
            "kv_cache_dtype": "fp8",
            "preempt_every": 2,
            "steps_ahead": 2,
        },
        {"dtype": "bfloat16", "max_num_seqs": 4096, "preempt_every": 1, "tensor_parallel_size": 2},
        {"dtype": "bfloat16", "max_num_seqs": 4096, "preempt_every": 1, "tensor_parallel_size": 4},
        {
            "dtype": "bfloat16",
            "max_num_seqs": 512,
            "kv_cache_tokens": 40_000,
            "kv_cache_dtype": "fp8",
            "tensor_parallel_size": 4,
        },
    ],
    ids=str,
)
def test_no_foreign_token_among_two_thousand(folder: Path, knobs: dict[str, Any]) -> None:
    nothing_foreign(folder, knobs)


@pytest.mark.parametrize(
    "knobs",
    [
        {"dtype": "bfloat16", "max_num_seqs": 4096, "preempt_every": 1},
        {
            "dtype": "bfloat16",
            "max_num_seqs": 64,
            "kv_cache_tokens": 40_000,
            "preempt_every": 5,
            "steps_ahead": 2,
        },
        {"dtype": "bfloat16", "quantization": "fp8", "max_num_seqs": 1024, "preempt_every": 2},
    ],
    ids=str,
)
def test_no_foreign_token_by_experts(knobs: dict[str, Any], tmp_path: Path) -> None:
    nothing_foreign(make_folder(tmp_path, experts=True), knobs)


@pytest.mark.parametrize(
    "knobs",
    [
        {"dtype": "bfloat16", "max_num_seqs": 1024, "preempt_every": 3},
        {
            "dtype": "float32",
            "max_num_seqs": 256,
            "kv_cache_tokens": 40_000,
            "preempt_every": 2,
            "steps_ahead": 3,
        },
        {
            "dtype": "bfloat16",
            "mamba_ssm_cache_dtype": "bfloat16",
            "max_num_seqs": 1024,
            "preempt_every": 3,
        },
        {"dtype": "bfloat16", "max_num_seqs": 1024, "preempt_every": 3, "tensor_parallel_size": 2},
        {
            "dtype": "float32",
            "max_num_seqs": 200,
            "speculative_config": {"prompt_lookup_min": 1},
            "preempt_every": 2,
            "steps_ahead": 3,
        },
    ],
    ids=str,
)
def test_no_foreign_token_by_states(knobs: dict[str, Any], tmp_path: Path) -> None:
    nothing_foreign(make_hybrid(tmp_path), knobs)


@pytest.mark.parametrize(
    "knobs",
    [
        {"dtype": "bfloat16", "max_num_seqs": 4096, "preempt_every": 1},
        {
            "dtype": "float32",
            "max_num_seqs": 256,
            "kv_cache_tokens": 40_000,
            "preempt_every": 2,
            "steps_ahead": 3,
        },
        {"dtype": "bfloat16", "max_num_seqs": 512, "prefix_groups": "off", "preempt_every": 3},
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "max_num_seqs": 1024, "preempt_every": 2},
        {"dtype": "bfloat16", "max_num_seqs": 4096, "preempt_every": 1, "tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_no_foreign_token_by_latents(knobs: dict[str, Any], tmp_path: Path) -> None:
    nothing_foreign(make_folder(tmp_path, latent=True), knobs)


def nothing_foreign(folder: Path, knobs: dict[str, Any]) -> None:
    if torch.cuda.device_count() < (ranks := knobs.get("tensor_parallel_size", 1)):
        pytest.skip(f"needs {ranks} GPUs")
    flock = Flock.of(2000, seed=3)
    with LLM(str(folder), **(KNOBS | knobs)) as llm:
        flock.fly(llm)
        stats = llm.stats()
        if not flock.wrong:
            _stream_closed_early(llm)
    said = sum(len(tokens) for bird in flock.birds for tokens in bird.said.values())
    print(
        f"{said} tokens of {len(flock.birds)} requests in {flock.steps} steps, {flock.left}"
        f" cancelled, {stats['preemptions']} preemptions, {flock.grouped} rows grouped,"
        f" {len(flock.wrong)} wrong"
    )
    assert not flock.wrong, flock.wrong[:3]
    assert (
        said > 50_000
        and flock.left > 50
        and stats["preemptions"] > 30
        and stats["prefix_hit_tokens"] > 1000
    )
    assert (flock.grouped > 0) is ("prefix_groups" not in knobs)


def _stream_closed_early(llm: LLM) -> None:
    """What is left of a stream that its reader closed is in nobody's way."""
    from penstock.llm import Prompt

    birds = Flock.of(300, seed=4).birds
    params = SamplingParams(temperature=0, max_tokens=90, detokenize=False)
    stream = llm.stream(
        Prompt(key=i, prompt=bird.canary.prompt, params=params) for i, bird in enumerate(birds)
    )
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # and it is kept: what it held must be let go of all the same
    outs = llm.generate([bird.canary.prompt for bird in birds[:50]], params, use_tqdm=False)
    for out, bird in zip(outs, birds, strict=False):
        assert out.outputs[0].token_ids == bird.canary.answer(90)


@pytest.mark.parametrize(
    "check", [bad_logits_cases.check_prompt, bad_logits_cases.check_own_blocks]
)
@pytest.mark.parametrize(
    "knobs", [{}, {"steps_ahead": 3, "dtype": "bfloat16"}, {"kernels": "reference"}], ids=str
)
def test_blocks_of_bad_logits_are_cleared_and_never_found(
    folder: Path, check: Callable[..., None], knobs: dict[str, Any]
) -> None:
    check(folder, device="cuda", **knobs)
