"""Drafts on a GPU, by graphs and by launches: the tokens are those without them, in fewer steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_model import make_folder
from equal_steps import count_as_equal
from oracle_drafter import Oracle

from penstock import LLM, SamplingParams

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ahead, most", [(0, 8), (1, 4), (3, 4)])
def test_prompt_lookup_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int, most: int
) -> None:
    """Steps count as equally long, so that rows draft whatever the GPU's pace."""
    count_as_equal(monkeypatch)
    prompts = [[2 + (i * 7 + k * k) % 280 for i in range(30 + k)] for k in range(48)]
    asks = [
        SamplingParams(
            temperature=k % 3 * 0.5,
            allowed_token_ids=[40 + k, 41 + k, 42 + k][: 1 + k % 3] if k % 4 else None,
            repetition_penalty=(1.0, 1.2)[k % 5 == 0],
            seed=k,
            max_tokens=60,
            logprobs=(None, 1)[k % 6 == 0],
            detokenize=False,
        )
        for k in range(48)
    ]
    knobs = {"device": "cuda", "dtype": "float32", "max_model_len": 160, "steps_ahead": ahead}
    told, steps = [], []
    for config in (None, {"num_speculative_tokens": most, "prompt_lookup_min": 2}):
        with LLM(
            str(make_folder(tmp_path)), speculative_config=config, kv_cache_tokens=50_000, **knobs
        ) as llm:
            outs = llm.generate(prompts, asks, use_tqdm=False)
            lone = llm.generate(prompts[:1], asks[1:2], use_tqdm=False)
            told.append([out.outputs[0].token_ids for out in outs + lone])
            steps.append(llm._engine.scheduler.counts["steps"])
            right = int(llm._engine.scheduler.drafting.right.sum())
    assert told[0] == told[1] and right > 0 and steps[1] < steps[0]


@pytest.mark.parametrize("ahead", [0, 2])
def test_drafts_change_no_token(tmp_path: Path, ahead: int) -> None:
    """Run ahead, what is offered is often for places that the row hasn't reached; read at once, it
    saves steps."""
    prompts = [[2 + (i * 7 + k * k) % 280 for i in range(30 + 2 * k)] for k in range(48)]
    asks = [
        SamplingParams(
            temperature=k % 3 * 0.5,
            top_p=(1.0, 0.8)[k % 2],
            repetition_penalty=(1.0, 1.2)[k % 5 == 0],
            seed=k,
            max_tokens=30,
            logprobs=(None, 1)[k % 4 == 0],
            detokenize=False,
        )
        for k in range(48)
    ]
    knobs = {
        "device": "cuda",
        "dtype": "float32",
        "max_num_seqs": 128,
        "max_model_len": 160,
        "steps_ahead": ahead,
    }
    knobs["kv_cache_tokens"] = 100_000
    with LLM(
        str(make_folder(tmp_path)), enable_prefix_caching=False, prefix_groups="always", **knobs
    ) as llm:
        alone = [
            llm.generate([p], [a], use_tqdm=False)[0] for p, a in zip(prompts, asks, strict=True)
        ]
        scheduler = llm._engine.scheduler
        scheduler.drafting.drafter = Oracle(scheduler, alone)
        steps = scheduler.counts["steps"]
        outs = llm.generate(prompts, asks, use_tqdm=False)
        assert [out.outputs[0].token_ids for out in outs] == [
            out.outputs[0].token_ids for out in alone
        ]
        assert scheduler.counts["drafted_tokens"] > 0
        assert ahead or scheduler.counts["steps"] - steps < 30
