"""Token for token the same: alone = batched = chunked = prefix-cached = preempted = forked, greedy
and sampled, mixed.

What "alone" gives is held against a slow twin of the whole engine first; the rest is held against
"alone".
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_model import CONTEXT, END, VOCABULARY, Comparison, Twin, logits_of, make_folder
from oracle_drafter import Oracle

from penstock import LLM, SamplingParams
from penstock.request import RequestOutput

pytestmark = pytest.mark.torch

HEADER = [40 + i * 7 % 200 for i in range(37)]  # two full blocks and a piece
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "penalties, greedy": {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
    "plain": {"temperature": 0.8},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "top_k": {"temperature": 1.2, "top_k": 4, "logprobs": 0},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "counted penalties": {"temperature": 0.9, "presence_penalty": 0.8, "frequency_penalty": 0.5},
    "bias": {"temperature": 1.0, "logit_bias": {5: 4.0, 9: -100.0, END: 2.0}},
    "min_tokens": {
        "temperature": 1.0,
        "min_tokens": 9,
        "stop_token_ids": [60, 61],
        "logit_bias": {60: 5.0, END: 5.0},
    },
    "stop ids": {
        "temperature": 1.0,
        "stop_token_ids": list(range(100, 130)),
        "ignore_eos": True,
        "logprobs": 3,
    },
    "all": {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "logprobs": 1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "logit_bias": {7: 1.5},
        "ignore_eos": True,
    },
    "allowed ids": {
        "temperature": 1.0,
        "allowed_token_ids": [*range(90, 50, -1), END],
        "top_k": 50,
        "top_p": 0.95,
    },
    "allowed ids, greedy": {
        "temperature": 0.0,
        "allowed_token_ids": [5, 70, 71, 299],
        "repetition_penalty": 1.5,
    },
    "bad words": {  # letters that no token joins
        "temperature": 1.0,
        "allowed_token_ids": [75, 76, 82, 89, 91],
        "bad_words": ["qx", " xz", "zzj", "k", "jjqx"],
    },
}


def params_of(name: str, **more: Any) -> SamplingParams:
    seed = 1000 + list(SETTINGS).index(name)
    return SamplingParams(
        **{"seed": seed, "max_tokens": 17, "detokenize": False} | SETTINGS[name] | more
    )


def prompts() -> list[list[int]]:
    """One a setting: of 1 to 90 tokens, some with the same beginning, one twice,
    one a block long."""
    rng = random.Random(3)
    drawn = [[rng.randrange(2, VOCABULARY) for _ in range(n)] for n in (1, 16, 17, 33, 90, 5, 8)]
    more = [HEADER + drawn[at] for at in (5, 6, 1, 5)]
    return [*drawn, *more, [*drawn[2], 7], [*drawn[3], 9], [*drawn[1], 5]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def twin(folder: Path) -> Twin:
    return logits_of(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder, enable_prefix_caching=False) as made:
        yield made


def open_llm(folder: Path, **knobs: Any) -> LLM:
    defaults = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "kv_cache_tokens": 8192,
        "dtype": "float32",
    }
    defaults["prefix_groups"] = "always"  # small groups too, which `auto` leaves alone
    return LLM(str(folder), **defaults | knobs)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[RequestOutput]:
    """Each prompt with its setting in a run of its own."""
    return [
        llm.generate([prompt], params_of(name), use_tqdm=False)[0]
        for prompt, name in zip(prompts(), SETTINGS, strict=True)
    ]


def test_alone_is_what_the_slow_twin_draws(twin: Twin, alone: list[RequestOutput]) -> None:
    compared = Comparison(twin)
    for out, name in zip(alone, SETTINGS, strict=True):
        params = params_of(name)
        want = twin.run(out.prompt_token_ids, params)
        compared.sample(name, out.prompt_token_ids, params, 0, want, out.outputs[0].token_ids)
    compared.close("alone")
    assert {out.outputs[0].finish_reason for out in alone} == {"stop", "length"}
    assert len({tuple(out.outputs[0].token_ids) for out in alone}) == len(alone)


def check_same(
    name: str, twin: Twin, alone: list[RequestOutput], outs: list[RequestOutput]
) -> None:
    compared = Comparison(twin)
    for want, got, setting in zip(alone, outs, SETTINGS, strict=True):
        a, b = want.outputs[0], got.outputs[0]
        compared.sample(
            f"{name}, {setting}",
            want.prompt_token_ids,
            params_of(setting),
            0,
            a.token_ids,
            b.token_ids,
        )
        if a.token_ids == b.token_ids:
            assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason), setting
            check_scores(a.logprobs, b.logprobs)
    compared.close(name)


def check_scores(want: Any, got: Any) -> None:
    assert (want is None) == (got is None)
    for a, b in zip(want or (), got or (), strict=True):
        assert list(a) == list(b)
        torch.testing.assert_close(
            [s.logprob for s in a.values()], [s.logprob for s in b.values()], atol=1e-4, rtol=1e-4
        )


VARIANTS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked, few rows": {"max_num_batched_tokens": 17, "max_num_seqs": 3},
    "one row": {"max_num_seqs": 1},
    "preempted, no cache, no groups": {
        "preempt_every": 2,
        "enable_prefix_caching": False,
        "prefix_groups": "off",
    },
    "preempted, chunked, 3 ahead": {
        "preempt_every": 2,
        "steps_ahead": 3,
        "max_num_batched_tokens": 64,
    },
    "few blocks, 3 ahead": {"kv_cache_tokens": CONTEXT + 32, "steps_ahead": 3},
    "read at once": {"steps_ahead": 0},
    "3 ahead": {"steps_ahead": 3},
    "no groups": {"prefix_groups": "off"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_gives_the_same_tokens_twice(
    variant: str, folder: Path, twin: Twin, alone: list[RequestOutput]
) -> None:
    with open_llm(folder, **VARIANTS[variant]) as llm:
        for run in ("first", "again, from the cache"):
            outs = llm.generate(prompts(), [params_of(name) for name in SETTINGS], use_tqdm=False)
            check_same(f"{variant}, {run}", twin, alone, outs)
        stats = llm.stats()
        if "preempt" in variant:
            assert stats["preemptions"] > 0
        if VARIANTS[variant].get("enable_prefix_caching", True):
            assert stats["prefix_hit_tokens"] > 0
        assert (stats["running"], stats["waiting"]) == (0, 0)


FORKS: dict[str, dict[str, Any]] = {
    "rows for all": {"max_num_seqs": 128},
    "fewer rows than samples": {"max_num_seqs": 7, "max_num_batched_tokens": 16},
    "no groups": {"max_num_seqs": 128, "prefix_groups": "off"},
    "preempted": {"max_num_seqs": 40, "preempt_every": 2, "steps_ahead": 2},
    "few blocks": {"max_num_seqs": 40, "kv_cache_tokens": CONTEXT + 64},
}


@pytest.fixture(scope="module")
def singles(llm: LLM) -> dict[tuple[str, int], list[list[int]]]:
    """The samples of a group, each drawn by itself: setting, n -> tokens."""
    found = {}
    for name, n in (("greedy", 2), ("plain", 12), ("all", 5), ("min_tokens", 5), ("stop ids", 5)):
        params = params_of(name, n=n)
        found[name, n] = [one_sample(llm, HEADER, params, index) for index in range(n)]
    return found


def one_sample(llm: LLM, prompt: list[int], params: SamplingParams, index: int) -> list[int]:
    from penstock.llm import Prompt

    (finished,) = llm.stream([Prompt(key=0, prompt=prompt, params=params, samples=[index])])
    assert finished.output is not None and finished.output.index == index
    return finished.output.token_ids


@pytest.mark.parametrize("variant", FORKS)
def test_a_fork_group_gives_what_its_samples_give_one_by_one(
    variant: str, folder: Path, twin: Twin, singles: dict[tuple[str, int], list[list[int]]]
) -> None:
    compared = Comparison(twin)
    with open_llm(folder, **FORKS[variant]) as llm:
        outs = llm.generate(
            [HEADER] * len(singles), [params_of(name, n=n) for name, n in singles], use_tqdm=False
        )
    for out, (name, n) in zip(outs, singles, strict=True):
        assert [o.index for o in out.outputs] == list(range(n))
        for output, want in zip(out.outputs, singles[name, n], strict=True):
            compared.sample(
                name, HEADER, params_of(name, n=n), output.index, want, output.token_ids
            )
    compared.close(variant)
    assert len({tuple(tokens) for tokens in singles["plain", 12]}) > 8


@pytest.mark.parametrize(
    "knobs", [{}, {"preempt_every": 2, "steps_ahead": 3}, {"kv_cache_tokens": CONTEXT + 32}]
)
def test_drafts_change_no_token(
    knobs: dict[str, Any], folder: Path, twin: Twin, alone: list[RequestOutput]
) -> None:
    """And save steps: several tokens of a row come of one."""
    with open_llm(folder, **knobs) as llm:
        scheduler = llm._engine.scheduler
        scheduler.drafting.drafter = Oracle(scheduler, alone)
        outs = llm.generate(prompts(), [params_of(name) for name in SETTINGS], use_tqdm=False)
        check_same(f"drafts, {knobs}", twin, alone, outs)
        assert scheduler.counts["drafted_tokens"] > 0
        if not knobs:
            assert scheduler.counts["steps"] < 17, "no draft was taken"


EIGHT: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked, few rows": {"max_num_batched_tokens": 17, "max_num_seqs": 3},
    "preempted, 3 ahead": {"preempt_every": 2, "steps_ahead": 3, "max_num_batched_tokens": 64},
    "few blocks": {"kv_cache_tokens": CONTEXT + 32, "steps_ahead": 3},
    "no cache, no groups": {"enable_prefix_caching": False, "prefix_groups": "off"},
}


@pytest.fixture(scope="module")
def alone_in_eight_bits(folder: Path) -> dict[str, list[RequestOutput]]:
    """Each prompt with its setting in a run of its own, and the samples of a fork one by one: KV in
    eight bits."""
    with open_llm(folder, enable_prefix_caching=False, kv_cache_dtype="fp8") as llm:
        assert llm.engine.runner.describe()["kv_cache_dtype"] == "float8_e4m3fn"
        pairs = zip(prompts(), SETTINGS, strict=True)
        alone = [
            llm.generate([prompt], params_of(name), use_tqdm=False)[0] for prompt, name in pairs
        ]
        forked = [one_sample(llm, HEADER, params_of("plain", n=8), index) for index in range(8)]
    return {"alone": alone, "forked": forked}  # type: ignore[dict-item]


@pytest.mark.parametrize("variant", EIGHT)
def test_kv_in_eight_bits_gives_the_same_tokens_every_way(
    variant: str,
    folder: Path,
    twin: Twin,
    alone_in_eight_bits: dict[str, list[Any]],
    alone: list[RequestOutput],
) -> None:
    with open_llm(folder, kv_cache_dtype="fp8", **EIGHT[variant]) as llm:
        for run in ("first", "again, from the cache"):
            outs = llm.generate(prompts(), [params_of(name) for name in SETTINGS], use_tqdm=False)
            check_same(f"eight bits, {variant}, {run}", twin, alone_in_eight_bits["alone"], outs)
        (fork,) = llm.generate([HEADER], params_of("plain", n=8), use_tqdm=False)
        assert [output.token_ids for output in fork.outputs] == alone_in_eight_bits["forked"]
    told = [
        (out.outputs[0].token_ids, plain.outputs[0].token_ids)
        for out, plain in zip(outs, alone, strict=True)
    ]
    assert any(a != b for a, b in told), "eight bits change no token: are they used?"


def test_near_ties_are_told_from_faults(twin: Twin) -> None:
    greedy = SamplingParams(temperature=0.0)
    row = twin.adjusted(HEADER, [], greedy)
    first, second = row.topk(2).indices.tolist()
    tied = SamplingParams(
        temperature=0.0, logit_bias={second: float(row[first] - row[second]) - NEAR_ENOUGH}
    )
    assert twin.is_near_tie(HEADER, [], tied, 0, {first, second})
    assert not twin.is_near_tie(HEADER, [], greedy, 0, {first, second})
    assert not twin.is_near_tie(HEADER, [], tied, 0, {first, int(row.argmin())})


NEAR_ENOUGH = 2e-5
