"""Drafts that the device makes: the host offers their number alone. The tokens are those without
drafts, in fewer steps, however late a step is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from draft_requests import open_llm, params_of, prompts_of
from engine_model import make_folder
from toy_proposer import draft_by_device

from penstock import SamplingParams
from penstock.request import RequestOutput

pytestmark = pytest.mark.torch

LONG = 40
PROMPTS = prompts_of(6)
ASKS: list[dict[str, Any]] = [  # of few tokens, so that what came comes again
    {"temperature": 0.0, "allowed_token_ids": [40, 41]},
    {"temperature": 1.0, "allowed_token_ids": [50], "logprobs": 1},
    {"temperature": 1.0, "allowed_token_ids": [60, 61], "logit_bias": {60: 6.0}, "n": 3},
    {"temperature": 0.0, "allowed_token_ids": [70, 71, 72], "repetition_penalty": 1.1},
    {
        "temperature": 0.5,
        "allowed_token_ids": [80, 81],
        "logit_bias": {80: 3.0},
        "stop_token_ids": [81],
    },
    {"temperature": 0.0, "allowed_token_ids": [90, 91]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def asked() -> list[SamplingParams]:
    return params_of(ASKS, LONG)


def told(outs: list[RequestOutput]) -> list[list[tuple[list[int], str | None]]]:
    return [[(sample.token_ids, sample.finish_reason) for sample in out.outputs] for out in outs]


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[tuple[list[list[tuple[list[int], str | None]]], int]]:
    """What is said without drafts, and in how many steps."""
    with open_llm(folder) as llm:
        outs = llm.generate(PROMPTS, asked(), use_tqdm=False)
        yield told(outs), llm._engine.scheduler.counts["steps"]


@pytest.mark.parametrize("ahead", range(4))
def test_they_change_no_token_and_save_steps(folder: Path, plain: Any, ahead: int) -> None:
    with open_llm(folder, steps_ahead=ahead) as llm:
        scheduler = llm._engine.scheduler
        proposer = draft_by_device(llm._engine.runner, scheduler, 2)
        outs = llm.generate(PROMPTS, asked(), use_tqdm=False)
        want, steps = plain
        assert told(outs) == want
        assert scheduler.counts["drafted_tokens"] > 0 and proposer.launched > 0
        assert max(len(sample.token_ids) for out in outs for sample in out.outputs) == LONG
        assert scheduler.counts["steps"] < 0.6 * steps


@pytest.mark.parametrize(
    "knobs",
    [
        {"max_num_batched_tokens": 24, "max_num_seqs": 5},
        {"preempt_every": 2, "steps_ahead": 3},
        {"kv_cache_tokens": 160 + 64, "steps_ahead": 2},
    ],
)
def test_they_change_no_token_of_rows_that_wait_and_come_back(
    folder: Path, plain: Any, knobs: dict[str, Any]
) -> None:
    with open_llm(folder, **knobs) as llm:
        draft_by_device(llm._engine.runner, llm._engine.scheduler, 2)
        assert told(llm.generate(PROMPTS, asked(), use_tqdm=False)) == plain[0]
        assert llm._engine.scheduler.counts["drafted_tokens"] > 0
