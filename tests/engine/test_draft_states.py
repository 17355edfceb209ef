"""speculative_config with models that have recurrent state: the tokens are those without drafts, in
fewer steps, however late a step is read. Steps count as equally long, so that rows draft whatever
the machine's pace."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from canary_drive import Flock
from canary_hybrid import make_hybrid
from equal_steps import count_as_equal
from execute_drive import tiny_runner
from hybrid_models import MODELS
from ranks_together import Together, met
from sample_drive import HEAD, Samples, drive, over

from penstock import LLM
from penstock.engine.engine import Engine
from penstock.execute.step_launches import StepLaunches
from penstock.kernels.inputs import StepInputs
from penstock.parallel.layout import Layout
from penstock.request import Request, SamplingParams
from penstock.speculative import SpeculativeConfig

pytestmark = pytest.mark.torch

HYBRIDS = ("lfm2", "qwen3_5", "nemotron")
ASKED = '{"num_speculative_tokens": 3, "prompt_lookup_min": 1}'
DRAFTS = SpeculativeConfig.of(ASKED)
ASKS: list[tuple[list[int], dict[str, Any]]] = [  # of few tokens, so that what came comes again
    (HEAD, {"temperature": 0.0, "allowed_token_ids": [40, 41, 42], "n": 3}),
    ([9], {"temperature": 1.0, "allowed_token_ids": [50, 51]}),
    (
        HEAD[:49],
        {"temperature": 1.0, "allowed_token_ids": [60, 61], "logit_bias": {60: 9.0}, "n": 3},
    ),
    ([11, 12, 13] * 9, {"temperature": 0.0, "repetition_penalty": 1.1}),
    (HEAD, {"temperature": 0.7, "allowed_token_ids": [70, 71]}),
    (HEAD[:33], {"temperature": 0.0, "allowed_token_ids": [80, 81, 82, 83], "n": 2}),
    ([*HEAD, 30, 31], {"temperature": 1.0, "n": 2}),  # constrained
]


@pytest.fixture(autouse=True)
def equal_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    count_as_equal(monkeypatch)


def asked() -> list[Request]:
    return [
        Request(
            request_id=number,
            prompt=np.array(prompt, np.int32).tobytes(),
            sampling=SamplingParams(max_tokens=26, seed=number, ignore_eos=True, **ask),
        )
        for number, (prompt, ask) in enumerate(ASKS)
    ]


@pytest.fixture(params=HYBRIDS)
def model(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MODELS[request.param]


def run_with_drafts(runner: Any, **knobs: Any) -> tuple[Samples, Engine]:
    return run(runner, speculative_config=ASKED, **knobs)


def run(runner: Any, **knobs: Any) -> tuple[Samples, Engine]:
    engine, threads = over(runner, **knobs)
    found = drive(engine, asked(), threads, together=3, forces=True)
    runner.close()
    return found, engine


@pytest.fixture(scope="module")
def without_drafts() -> Callable[[str], tuple[Samples, int]]:
    """Drives a model's requests once, whatever order its tests come in."""

    @cache
    def found_by(name: str) -> tuple[Samples, int]:
        found, engine = run(tiny_runner(**MODELS[name]), steps_ahead=0)
        drafted = engine.scheduler.counts["drafted_tokens"]
        assert not drafted, "tokens were forced without room for them"
        return found, engine.scheduler.counts["steps"]

    return found_by


@pytest.fixture
def plain(
    model: dict[str, Any], without_drafts: Callable[[str], tuple[Samples, int]]
) -> tuple[Samples, int]:
    """What is said without drafts, and in how many steps."""
    return without_drafts(next(name for name in HYBRIDS if MODELS[name] is model))


@pytest.mark.parametrize(
    ("model", "ahead", "tight"),
    [
        ("lfm2", 0, False),
        ("lfm2", 3, True),
        ("qwen3_5", 1, False),
        ("qwen3_5", 2, True),
        ("nemotron", 3, False),
        ("nemotron", 3, True),
    ],
    indirect=["model"],
)
def test_drafts_change_no_token(
    model: dict[str, Any], plain: tuple[Samples, int], ahead: int, tight: bool
) -> None:
    """Forks, snapshots and forced tokens among them. tight: few blocks, slots and tokens a step;
    rows are preempted all the time."""
    limits = {"blocks": 24, "snapshots": 2, "max_batched_tokens": 24} if tight else {"snapshots": 3}
    runner = tiny_runner(**model, **limits, speculative=DRAFTS)
    found, engine = run_with_drafts(runner, steps_ahead=ahead, preempt_every=5 if tight else 0)
    assert found == plain[0]
    scheduler = engine.scheduler
    right, offered = int(scheduler.drafting.right.sum()), scheduler.drafting.counts["tokens"]
    assert 0 < right < offered < scheduler.counts["drafted_tokens"]
    assert tight or scheduler.counts["steps"] < plain[1]
    assert scheduler.slots.hits > 0 and (scheduler.stats()["preemptions"] > 5 or not tight)


def test_a_state_that_is_not_taken_back_is_seen(
    model: dict[str, Any], plain: tuple[Samples, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of drafts, as if they were in the state: right ones are not folded again."""
    count = StepLaunches._count_folded

    def careless(folded: torch.Tensor, inputs: StepInputs, chunks: Any) -> None:
        count(folded, inputs, chunks)
        rows, newest = inputs.states.slots.long(), inputs.positions[: inputs.rows]  # type: ignore[union-attr]
        folded.scatter_reduce_(0, rows, newest.to(torch.int32) + 1, "amax")

    monkeypatch.setattr(StepLaunches, "_count_folded", staticmethod(careless))
    assert run_with_drafts(tiny_runner(**model, speculative=DRAFTS))[0] != plain[0]


@pytest.mark.parametrize("model", ["qwen3_5", "nemotron"], indirect=True)
def test_two_ranks_give_the_tokens_of_one(
    model: dict[str, Any], plain: tuple[Samples, int], tmp_path: Path
) -> None:
    layouts = [
        Layout(rank, 2, end.all_reduce, end.all_gather) for rank, end in enumerate(met(tmp_path, 2))
    ]
    runners = [tiny_runner(**model, layout=layout, speculative=DRAFTS) for layout in layouts]
    one, threads = over(runners[0], preempt_every=7, speculative_config=ASKED)
    engine = Engine(one.scheduler, Together(runners), steps_ahead=1)  # type: ignore[arg-type]
    assert drive(engine, asked(), threads, together=3, forces=True) == plain[0]
    assert one.scheduler.drafting.right.sum() > 0
    for runner in runners:
        runner.close()


def test_an_engine_that_is_opened_says_nothing_foreign(tmp_path: Path) -> None:
    """Canaries, whose prompts say what comes: nearly all drafts are right."""
    flock = Flock.of(16, seed=3)
    with LLM(
        str(make_hybrid(tmp_path)),
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=512,
        speculative_config={"num_speculative_tokens": 5, "prompt_lookup_min": 1},
    ) as llm:
        flock.fly(llm)
        drafting = llm._engine.scheduler.drafting
        assert not flock.wrong and drafting.right.sum() > 0.8 * drafting.counts["tokens"] > 0
