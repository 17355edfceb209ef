"""Logprobs that go up late: those of a sample that isn't streamed are those of the same sample
streamed token by token.

With rows that are preempted, blocks that run out, stop strings, forks, and requests of different k
beside each other.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_model import CONTEXT, END, make_folder

from penstock import LLM, SamplingParams
from penstock.engine.logprobs import LazyLogprobs
from penstock.request import Delta, Logprob

pytestmark = pytest.mark.torch

PROMPTS = [[40 + i * 7 % 200 for i in range(n)] for n in (1, 15, 16, 17, 37, 60)]
PROMPTS += [PROMPTS[4], PROMPTS[4] + [9]]
ASKED: list[dict[str, Any]] = [
    {"logprobs": 0, "n": 3},
    {"logprobs": 2},
    {"logprobs": 5, "n": 2},
    {},
    {"logprobs": 0, "stop": ["m", "12", "42", "q"], "n": 2},
    {"logprobs": 5, "stop": ["e", "t", "1", "o", "y"], "min_tokens": 5},
    {
        "logprobs": 1,
        "temperature": 0.0,
        "n": 2,
    },  # its samples are alike: their blocks are one another's in the tree
    {"logprobs": 3, "temperature": 0.0, "n": 2},
]
Sample = tuple[list[int], str, Any, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def params() -> list[SamplingParams]:
    """Alike but for what ASKED says; a sample ends by an end id, a stop string or its limit."""
    return [
        SamplingParams(
            **{"seed": i, "max_tokens": 40, "temperature": 1.0, "logit_bias": {END: 1.0}} | asked
        )
        for i, asked in enumerate(ASKED)
    ]


def open_llm(folder: Path, **knobs: Any) -> LLM:
    defaults = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "kv_cache_tokens": 4096,
        "dtype": "float32",
    }
    return LLM(str(folder), **defaults | knobs)


def streamed(llm: LLM) -> dict[tuple[int, int], list[Delta]]:
    """Every sample's deltas, each of a token: by prompt and sample."""
    asked = [llm._client.submit(p, s, stream=True) for p, s in zip(PROMPTS, params(), strict=True)]
    place = {a.request_id: i for i, a in enumerate(asked)}
    found: dict[tuple[int, int], list[Delta]] = {}
    while llm._client.asked:
        up = llm._engine.step()
        for delta in [] if up is None else llm._client.process(up):
            assert len(delta.token_ids) <= 1
            found.setdefault((place[delta.request_id], delta.index), []).append(delta)
    llm._settle()
    return found


@pytest.fixture(scope="module")
def want(folder: Path) -> Iterator[dict[tuple[int, int], Sample]]:
    with open_llm(folder) as llm:
        whole = {}
        for key, deltas in streamed(llm).items():
            tokens = [t for d in deltas for t in d.token_ids]
            scores = (
                None
                if deltas[0].logprobs is None
                else [p for d in deltas for p in d.logprobs or []]
            )
            whole[key] = tokens, "".join(d.text for d in deltas), deltas[-1].stop_reason, scores
        yield whole


VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "preempted, 3 ahead": {"preempt_every": 2, "steps_ahead": 3},
    "few blocks, read at once": {"kv_cache_tokens": CONTEXT + 32, "steps_ahead": 0},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_late_logprobs_are_the_streamed_ones(
    name: str, folder: Path, want: dict[tuple[int, int], Sample]
) -> None:
    with open_llm(folder, **VARIANTS[name]) as llm:
        outs = llm.generate(list(PROMPTS), params(), use_tqdm=False)
        preempted = llm.stats()["preemptions"]
    assert preempted or "preempt" not in name, "nothing was preempted"
    compared = 0
    for i, out in enumerate(outs):
        k = ASKED[i].get("logprobs")
        assert len(out.outputs) == ASKED[i].get("n", 1)
        for output in out.outputs:
            tokens, text, stop, scores = want[i, output.index]
            assert (output.token_ids, output.text, output.stop_reason) == (tokens, text, stop)
            assert (output.logprobs is None) == (scores is None) == (k is None)
            if output.logprobs is None:
                assert output.cumulative_logprob is None
                continue
            check_scores(output.token_ids, list(output.logprobs), scores, k)
            chosen = sum(
                p[t].logprob for p, t in zip(output.logprobs, output.token_ids, strict=True)
            )
            assert output.cumulative_logprob == pytest.approx(chosen)
            compared += len(tokens)
    assert compared > 100
    ended = [isinstance(o.stop_reason, str) for i in (4, 5) for o in outs[i].outputs]
    assert any(ended), "no stop string was met"


def check_scores(tokens: list[int], got: list[Any], want: list[Any], k: int) -> None:
    assert len(got) == len(want) == len(tokens)
    for token, a, b in zip(tokens, got, want, strict=True):
        assert next(iter(a)) == token and k <= len(a) <= k + 1
        assert [(t, s.rank, s.decoded_token) for t, s in a.items()] == [
            (t, s.rank, s.decoded_token) for t, s in b.items()
        ]
        np.testing.assert_allclose(
            [s.logprob for s in a.values()], [s.logprob for s in b.values()], atol=1e-4
        )


# --- the sequence itself --------------------------------------------------------------------------


def lazy(tokens: list[int], spell: Any = str) -> LazyLogprobs:
    """Token t has logprob -t and rank 3; the likely ones are 7 and, at odd places, nobody."""
    t = np.array(tokens, np.int32)
    ids = np.stack((np.full(t.size, 7), np.where(np.arange(t.size) % 2, -1, 8)), axis=1).astype(
        np.int32
    )
    rank = np.full(t.size, 3, np.int32)
    return LazyLogprobs(
        (t, -t.astype(np.float32), rank, ids, np.full(ids.shape, -0.5, np.float32)), spell
    )


def test_lazy_logprobs_read_as_a_list() -> None:
    first = {5: Logprob(-5.0, 3, "5"), 7: Logprob(-0.5, 1, "7"), 8: Logprob(-0.5, 2, "8")}
    plain = [
        first,
        {7: Logprob(-7.0, 3, "7")},
        {6: Logprob(-6.0, 3, "6"), 7: first[7], 8: first[8]},
    ]
    scores = lazy([5, 7, 6])
    assert (
        len(scores) == 3
        and list(scores) == plain
        and [list(p) for p in scores] == [[5, 7, 8], [7], [6, 7, 8]]
    )
    assert scores == plain and plain == scores and scores == lazy([5, 7, 6]) and scores != plain[:2]
    assert scores != lazy([5, 7, 4]) and scores != tuple(plain)
    assert repr(scores) == repr(plain)
    for at in (0, 1, 2, -1, -3, np.int64(1)):
        assert scores[at] == plain[at]
    for part in (slice(1, None), slice(None, -1), slice(None, None, 2), slice(3, 9)):
        assert scores[part] == plain[part] and isinstance(scores[part], LazyLogprobs)
    assert (
        list(reversed(scores)) == plain[::-1] and plain[1] in scores and scores.index(plain[2]) == 2
    )
    for at in (3, -4):
        with pytest.raises(IndexError):
            scores[at]
    assert not scores[:0] and scores
    assert scores.added_to(0.0) == pytest.approx(-18.0) and scores[:0].added_to(-1.5) == -1.5
    assert [s.decoded_token for p in lazy([5], None) for s in p.values()] == [None] * 3
    assert LazyLogprobs.joined([scores[:1], scores[1:]]) == plain


def test_lazy_logprobs_are_copied_as_the_list_that_they_stand_for() -> None:
    scores = lazy([5, 7])
    for other in (copy.copy(scores), copy.deepcopy(scores)):
        assert type(other) is list and other == scores
    with pytest.raises(TypeError):
        hash(scores)
    assert json.dumps([sorted(position) for position in scores]) == "[[5, 7, 8], [7]]"


def test_one_sample_kept_does_not_keep_its_message(folder: Path) -> None:
    with open_llm(folder) as llm:
        out = llm.generate(
            [PROMPTS[2]], SamplingParams(n=4, logprobs=2, max_tokens=9, seed=1), use_tqdm=False
        )[0]
    for output in out.outputs:
        assert isinstance(output.logprobs, LazyLogprobs)
        assert all(
            column.base is None or column.base.size == column.size
            for column in output.logprobs._columns
        )
