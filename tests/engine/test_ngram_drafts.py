"""speculative_config {"method": "ngram"}: the tokens are those without drafts, in fewer steps,
whatever is asked and however late a step is read. Steps count as equally long, so that the
machine's pace decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from draft_requests import open_llm, params_of, prompts_of
from engine_model import make_folder
from equal_steps import count_as_equal

from penstock import LLM, SamplingParams, StructuredOutputsParams
from penstock.engine.client import PendingRequest
from penstock.errors import UsageError
from penstock.request import RequestOutput
from penstock.schedule.group_texts import SLOTS, GroupTexts
from penstock.schedule.step import JOIN_RECORD

pytestmark = pytest.mark.torch

LONG, SHORT = 48, 30  # tokens of a sample
PROMPTS = prompts_of(7)
ASKS: list[dict[str, Any]] = [  # of few tokens, so that what came comes again
    {"temperature": 0.0, "allowed_token_ids": [40, 41]},
    {"temperature": 1.0, "allowed_token_ids": [50], "logprobs": 2},
    {"temperature": 1.0, "allowed_token_ids": [60, 61], "logit_bias": {60: 6.0}, "n": 3},
    {"temperature": 0.8, "allowed_token_ids": [70, 71, 72], "repetition_penalty": 1.1},
    {
        "temperature": 0.5,
        "allowed_token_ids": [80, 81],
        "logit_bias": {80: 3.0},
        "stop_token_ids": [81],
        "min_tokens": 9,
    },
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "bad_words": []},  # of all tokens
    {"temperature": 0.0, "allowed_token_ids": [90, 91], "frequency_penalty": 0.1},
]
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2}


@pytest.fixture(autouse=True)
def equal_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    count_as_equal(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def asked() -> list[SamplingParams]:
    return params_of(ASKS, SHORT)


def told(outs: list[RequestOutput]) -> list[Any]:
    return [
        [(one.token_ids, one.finish_reason, one.stop_reason, one.logprobs) for one in out.outputs]
        for out in outs
    ]


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[tuple[list[Any], int]]:
    """What is said without drafts, and in how many steps."""
    with open_llm(folder) as llm:
        outs = llm.generate(PROMPTS, asked(), use_tqdm=False)
        yield told(outs), llm._engine.scheduler.counts["steps"]


@pytest.mark.parametrize("knobs", [{}, {"preempt_every": 5}, {"kv_cache_tokens": 512}])
def test_a_request_learns_how_many_drafts_were_right(
    folder: Path, monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any]
) -> None:
    """All samples end at their limit, so all steps with their drafts are read before."""
    learned: dict[int, PendingRequest] = {}
    count = PendingRequest.count_guesses

    def look(self: PendingRequest, right: int, wrong: int) -> None:
        learned[self.request_id] = self
        count(self, right, wrong)

    monkeypatch.setattr(PendingRequest, "count_guesses", look)
    with open_llm(folder, speculative_config=SPECULATIVE, steps_ahead=0, **knobs) as llm:
        llm.generate(PROMPTS, asked(), use_tqdm=False)
        stats = llm.stats()
    right, wrong = (sum(each.guesses[at] for each in learned.values()) for at in range(2))
    assert len(learned) > 3 and right == stats["spec_accepted_tokens"] > 0
    assert wrong == stats["spec_draft_tokens"] - right


def close(found: list[Any], wanted: list[Any]) -> bool:
    """Equal, but for the last digits of logprobs: products of other sizes add up in other orders."""
    for mine, theirs in zip(found, wanted, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            if one[:3] != other[:3]:
                return False
            for at, by in zip(one[3] or (), other[3] or (), strict=True):
                assert at.keys() == by.keys()
                assert all(at[t].logprob == pytest.approx(by[t].logprob, abs=1e-4) for t in at)
    return True


@pytest.mark.parametrize("ahead", range(4))
def test_the_tokens_are_the_same_and_some_drafts_are_right(
    folder: Path, plain: Any, ahead: int
) -> None:
    with open_llm(folder, steps_ahead=ahead, speculative_config=SPECULATIVE) as llm:
        outs = llm.generate(PROMPTS, asked(), use_tqdm=False)
        want, steps = plain
        assert close(told(outs), want)
        drafting = llm._engine.scheduler.drafting
        right = int(drafting.right.sum())
        assert 0 < right < drafting.counts["tokens"] and drafting.counts["drafts"] > 0
        stats = llm.stats()
        assert (
            stats["spec_accepted_tokens"]
            == right
            == sum(stats[f"spec_accepted_at_{at}"] for at in range(4))
        )
        assert stats["spec_draft_tokens"] == drafting.counts["tokens"] and stats["spec_drafts"] > 0
        assert "spec_accepted_at_4" not in stats
        assert (np.diff(drafting.right) <= 0).all(), "a draft is right only if those before it are"
        # a row that is never guessed right takes as many steps as before
        assert llm._engine.scheduler.counts["steps"] <= steps + ahead


@pytest.mark.parametrize(
    "knobs",
    [
        {"max_num_batched_tokens": 24, "max_num_seqs": 5},
        {"preempt_every": 2, "steps_ahead": 3},
        {"kv_cache_tokens": 160 + 64, "steps_ahead": 2},
        {"enable_prefix_caching": False, "steps_ahead": 2},
    ],
)
def test_rows_that_wait_and_come_back(folder: Path, plain: Any, knobs: dict[str, Any]) -> None:
    with open_llm(folder, **knobs, speculative_config=SPECULATIVE) as llm:
        assert close(told(llm.generate(PROMPTS, asked(), use_tqdm=False)), plain[0])
        assert llm._engine.scheduler.drafting.right.sum() > 0


@pytest.mark.parametrize("drafts, steps", [(1, 31), (4, 14), (8, 9)])
def test_a_lone_row_that_repeats_itself_takes_few_steps(
    folder: Path, drafts: int, steps: int
) -> None:
    """A single row has room for its drafts, across the ends of blocks too."""
    ask = SamplingParams(max_tokens=LONG, ignore_eos=True, allowed_token_ids=[50], seed=1)
    config = SPECULATIVE | {"num_speculative_tokens": drafts}
    with open_llm(folder, max_num_seqs=1, steps_ahead=0, speculative_config=config) as llm:
        out = llm.generate([PROMPTS[0]], ask, use_tqdm=False)[0]
        assert out.outputs[0].token_ids == [50] * LONG
        # the first three tokens are not foreseen, and nothing is known of a step before the third
        assert llm._engine.scheduler.counts["steps"] <= steps


def test_samples_find_what_those_before_them_said(folder: Path) -> None:
    """Two rows, six equal samples of a prompt: the third goes on as the first did. Without the
    group's text a row knows its own alone, which says nothing twice."""
    ask = SamplingParams(
        max_tokens=SHORT, ignore_eos=True, temperature=0.0, n=6, presence_penalty=2.0
    )
    told, steps = [], []
    for source in (None, "row", "group"):
        asked = {} if source is None else {"speculative_config": SPECULATIVE, "draft_from": source}
        with open_llm(folder, max_num_seqs=2, steps_ahead=0, **asked) as llm:
            out = llm.generate([PROMPTS[1], PROMPTS[2]], ask, use_tqdm=False)
            told.append([[one.token_ids for one in each.outputs] for each in out])
            steps.append(llm._engine.scheduler.counts["steps"])
            texts = llm._engine.scheduler.drafting.texts
            assert (texts is not None) == (source == "group")
    assert told[0] == told[1] == told[2]
    assert steps[2] < 0.6 * steps[1] <= 0.6 * steps[0]
    assert texts is not None and len(texts._free) == SLOTS, "each request gave its slot back"


def test_samples_that_a_stop_string_ends_are_kept_too() -> None:
    """The client ends them by a cancel. The demo's greedy samples of a prompt are equal."""
    ask = SamplingParams(max_tokens=100, temperature=0.0, n=2, stop=["####"])
    steps = []
    for source in ("row", "group"):
        with LLM(
            "demo",
            dtype="float32",
            max_num_seqs=1,
            steps_ahead=0,
            speculative_config=SPECULATIVE,
            draft_from=source,
        ) as llm:
            out = llm.generate(["Question: Tom has 3 apples."], ask, use_tqdm=False)[0]
            assert {one.stop_reason for one in out.outputs} == {"####"}
            steps.append(llm._engine.scheduler.counts["steps"])
    assert steps[1] < 0.75 * steps[0]


def test_two_ranks_draft_the_same(folder: Path, plain: Any) -> None:
    """Drafts are a step's input, so ranks with other drafts would give other tokens."""
    config: dict[str, Any] = {"speculative_config": SPECULATIVE, "draft_from": "group"}
    with open_llm(folder, tensor_parallel_size=2, **config) as llm:
        for _ in range(2):  # the second time texts of the first are gone
            assert close(told(llm.generate(PROMPTS, asked(), use_tqdm=False)), plain[0])
        assert llm._engine.scheduler.drafting.right.sum() > 0


def test_sleep_loses_the_texts_and_nothing_else(folder: Path, plain: Any) -> None:
    with open_llm(folder, speculative_config=SPECULATIVE, draft_from="group") as llm:
        assert close(told(llm.generate(PROMPTS, asked(), use_tqdm=False)), plain[0])
        llm.sleep(level=1)
        llm.wake_up()
        before = llm._engine.scheduler.drafting.right.sum()
        assert close(told(llm.generate(PROMPTS, asked(), use_tqdm=False)), plain[0])
        assert llm._engine.scheduler.drafting.right.sum() > before


def test_beside_rows_that_a_grammar_holds() -> None:
    """A constrained row gets the tokens that its grammar forces, its neighbours guesses."""
    shared: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "seed": 3}
    form = {"choice": ["the answer is seven", "the answer is eight"]}
    asks = [
        SamplingParams(**shared, structured_outputs=StructuredOutputsParams(**form)),
        SamplingParams(**shared, ignore_eos=True),
        SamplingParams(**shared, ignore_eos=True, allowed_token_ids=[70]),
    ]
    prompts = ["How many are 3 and 4?", "1 2 3 1 2 3 1 2", "go on"]
    found = []
    for config in (None, SPECULATIVE):
        with LLM("demo", dtype="float32", speculative_config=config) as llm:
            outs = llm.generate(prompts, asks, use_tqdm=False)
            found.append([out.outputs[0].token_ids for out in outs])
            assert outs[0].outputs[0].text in form["choice"]
            right = int(llm._engine.scheduler.drafting.right.sum())
    assert found[0] == found[1] and right > 0


def test_texts_of_ended_samples_are_kept_by_request() -> None:
    """Two slots of ten tokens: written round, given back, begun anew."""

    def request(samples: int) -> Any:
        record = np.zeros(1, JOIN_RECORD)
        record["text_slot"] = -1
        return SimpleNamespace(outstanding=samples, record=record)

    def ended(*samples: tuple[int, Any]) -> None:
        """Samples of a number of tokens, of requests."""
        lengths = np.array([count for count, _ in samples], np.int32)
        slots = np.array([int(of.record["text_slot"][0]) for _, of in samples])
        texts.ended(slots, lengths, np.concatenate([ids[:count] for count, _ in samples]))

    def kept() -> dict[int, list[int]]:
        """Returns the tokens on the device by slot, the oldest first, after a launch."""
        fresh = texts.launched()
        assert fresh is not None and np.unique(fresh.places).size == fresh.places.size
        device[fresh.places] = fresh.tokens
        return {
            slot: [t for t in np.roll(device[slot * 10 :][:10], -newest[slot]).tolist() if t >= 0]
            if filled
            else []
            for slot, filled in zip(fresh.slots.tolist(), fresh.filled.tolist(), strict=True)
        }

    texts, ids = GroupTexts(slots=2, width=10), np.arange(100, dtype=np.int32)
    device, newest = np.full(20, -1), [0, 0]  # the place behind each slot's newest token
    one, two, three, single = request(3), request(2), request(2), request(1)
    for each in (one, two, three, single):
        texts.join(each)
    slots = [int(each.record["text_slot"][0]) for each in (one, two, three, single)]
    assert slots == [1, 0, -1, -1]
    assert kept() == {0: [], 1: []} and texts.launched() is None
    ended((7, one))
    ended((40, two), (6, one))
    newest[:] = 40 % 10, 13 % 10
    assert kept() == {0: [*range(30, 40)], 1: [3, 4, 5, 6, 0, 1, 2, 3, 4, 5][-10:]}
    ended((5, one), (1, two))
    texts.leave(one)
    texts.join(three)
    assert int(one.record["text_slot"][0]) == -1 and int(three.record["text_slot"][0]) == 1
    newest[0] = 41 % 10
    assert kept() == {0: [*range(31, 40), 0], 1: []}
    for count in range(30):  # while nothing drafts, only the newest are held
        ended((count, two), (1, three))
        assert texts._held < 80 + 30
    held = [t for count in range(30) for t in range(count)][-10:]
    fresh = texts.launched()
    assert fresh is not None and (fresh.slots.tolist(), fresh.filled.tolist()) == ([0, 1], [10, 3])
    assert fresh.tokens[np.argsort((fresh.places[:10] - fresh.places[0]) % 10)].tolist() == held
    texts.forget_all()
    ended((3, two))
    fresh = texts.launched()
    assert fresh is not None and (fresh.places.tolist(), fresh.filled.tolist()) == ([0, 1, 2], [3])


@pytest.mark.parametrize(
    "config, why",
    [
        ({"method": "medusa"}, "method 'medusa' is not served: take ngram, mtp, eagle3, df"),
        (
            {"num_speculative_tokens": 9},
            "num_speculative_tokens must be a number between 1 and 8, not 9",
        ),
        (
            {"num_speculative_tokens": 0},
            "num_speculative_tokens must be a number between 1 and 8, not 0",
        ),
        ({"method": {}}, "method {} is not served"),
        ({"method": {1}}, "is no JSON"),
        (
            {"prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "prompt_lookup_min is above prompt_lookup_max",
        ),
        ({"prompt_lookup_min": 10**99}, "prompt_lookup_min must be a number between 1 and 16"),
        ({"prompt_lookup_max": 99}, "prompt_lookup_max must be a number between 1 and 16, not 99"),
        (
            {"prompt_lookup_max": "4"},
            "prompt_lookup_max must be a number between 1 and 16, not '4'",
        ),
        ({"num_speculative_tokens": True}, "must be a number between 1 and 8, not True"),
        ({"tokens": 3}, "key 'tokens' is not known: take method, num_speculative_tokens"),
        ("[]", "must be an object such as"),
        ("ngram", "is no JSON"),
    ],
)
def test_what_is_refused(folder: Path, config: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        open_llm(folder, speculative_config=config)
    assert caught.value.param == "speculative_config" and "\n" not in str(caught.value)


def test_a_source_of_drafts_without_drafts_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="draft_from is read only with speculative_config"):
        open_llm(folder, draft_from="group")
