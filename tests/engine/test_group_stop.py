"""A request's samples that end when enough of them agree: which, what is told of the rest, and who
hears of it."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_model import END, make_folder

from penstock import LLM, SamplingParams, StopWhen
from penstock.config import Config
from penstock.engine.group_stop import GroupStop
from penstock.errors import UsageError
from penstock.llm import Prompt
from penstock.replicas.launch_engines import launch_engines
from penstock.request import Delta, RequestOutput
from penstock.text.answer_pattern import AnswerPattern

pytestmark = pytest.mark.torch

PROMPT = [40 + i * 7 % 200 for i in range(37)]
ANSWER = r"([aeiou])"  # the first of these in a sample


def params_of(**more: Any) -> SamplingParams:
    return SamplingParams(**{"n": 24, "seed": 5, "max_tokens": 60, "logit_bias": {END: 4.0}} | more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


def open_llm(folder: Path, **knobs: Any) -> LLM:
    defaults = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "kv_cache_tokens": 2048,
        "dtype": "float32",
    }
    return LLM(str(folder), **defaults | knobs)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as made:
        yield made


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[int, Any]:
    """The samples of a request that nothing ends, by their index."""
    (out,) = llm.generate([PROMPT], params_of(), use_tqdm=False)
    return {sample.index: sample for sample in out.outputs}


def check(out: RequestOutput, alone: dict[int, Any], agree: int, rows: int) -> None:
    """Enough samples agree, no other answer did before; the rest say that they were cut, with a
    beginning of what they would have been. rows: how many could end in the step that decided."""
    assert out.error is None and [sample.index for sample in out.outputs] == list(range(24))
    answers: Counter[str] = Counter()
    cut = 0
    for sample in out.outputs:
        truth = alone[sample.index]
        if sample.finish_reason == "abort":
            cut += 1
            assert sample.stop_reason == "stop_when"
            assert sample.token_ids == truth.token_ids[: len(sample.token_ids)] != truth.token_ids
            assert truth.text.startswith(sample.text.rstrip("\ufffd"))
        else:
            assert (sample.token_ids, sample.text, sample.finish_reason) == (
                truth.token_ids,
                truth.text,
                truth.finish_reason,
            )
            found = re.search(ANSWER, sample.text)
            answers.update([found[1]] if found else [])
    assert cut > 0 and max(answers.values()) >= agree
    assert (
        sorted(answers.values())[-1] - agree < rows
        and sum(a >= agree for a in answers.values()) <= rows
    )


@pytest.mark.parametrize("agree", [1, 3])
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"preempt_every": 3, "steps_ahead": 2},
        {"max_num_seqs": 4, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_the_rest_end_when_enough_agree(
    folder: Path, llm: LLM, alone: dict[int, Any], knobs: dict[str, Any], agree: int
) -> None:
    asked = params_of(stop_when=StopWhen(pattern=ANSWER, agree=agree))
    used = open_llm(folder, **knobs) if knobs else llm
    try:
        free, out = used.generate([[9, 8, 7], PROMPT], [params_of(n=2), asked], use_tqdm=False)
        check(out, alone, agree, rows=16)
        assert {sample.finish_reason for sample in free.outputs} <= {"stop", "length"}, (
            "another request was cut"
        )
        stats = used.stats()
        assert (stats["running"], stats["waiting"], stats["kv_usage"]) == (0, 0, 0)
        if "preempt_every" in knobs:
            assert stats["preemptions"] > 0
    finally:
        if knobs:
            used.close()


def test_what_was_drawn_is_told_with_its_logprobs_and_counted(
    llm: LLM, alone: dict[int, Any]
) -> None:
    before = llm.stats()["generation_tokens"]
    asked = params_of(stop_when=StopWhen(pattern=ANSWER), logprobs=1, stop=["never said"])
    (out,) = llm.generate([PROMPT], asked, use_tqdm=False)
    check(out, alone, 1, rows=16)
    made = sum(len(sample.token_ids) for sample in out.outputs)
    assert (
        made
        == llm.stats()["generation_tokens"] - before
        < sum(len(s.token_ids) for s in alone.values())
    )
    for sample in out.outputs:
        assert sample.logprobs is not None and len(sample.logprobs) == len(sample.token_ids)
    assert any(sample.token_ids for sample in out.outputs if sample.finish_reason == "abort")


def test_streams_and_several_engines_count_together(folder: Path, alone: dict[int, Any]) -> None:
    async def run(streamed: bool, count: int) -> RequestOutput:
        config = Config.of(
            model=str(folder),
            max_num_seqs=8,
            max_num_batched_tokens=64,
            kv_cache_tokens=2048,
            dtype="float32",
            data_parallel_size=count,
        )
        client = await launch_engines(config)
        out = RequestOutput("0", None, PROMPT)
        try:
            stream = client.submit(
                PROMPT, params_of(stop_when=StopWhen(pattern=ANSWER, agree=2)), stream=streamed
            )
            samples: dict[int, Any] = {}
            async for deltas in stream:
                for delta in deltas:
                    whole = samples.setdefault(delta.index, Delta(0, delta.index))
                    assert whole.finish_reason is None, "news after the end"
                    whole.text += delta.text
                    whole.token_ids += delta.token_ids
                    whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
            out.outputs = [samples[index] for index in sorted(samples)]
        finally:
            await client.close()
        return out

    for streamed, count in ((True, 1), (False, 2)):
        check(asyncio.run(run(streamed, count)), alone, 2, rows=8 * count)


def test_a_search_that_fails_elsewhere_ends_the_rest_with_its_error(folder: Path) -> None:
    """As a server's: the loop waits for no search, so the sample itself is told before."""

    async def run() -> list[Delta]:
        config = Config.of(
            model=str(folder),
            max_num_seqs=8,
            max_num_batched_tokens=64,
            kv_cache_tokens=2048,
            dtype="float32",
        )
        client = await launch_engines(config)

        async def fails() -> str | None:
            raise UsageError("stop_when.pattern takes too long", param="stop_when")

        group_stop = GroupStop(lambda text: asyncio.ensure_future(fails()), 2)
        try:
            stream = client.submit(PROMPT, params_of(), stream=False, group_stop=group_stop)
            return [delta async for deltas in stream for delta in deltas]
        finally:
            await client.close()

    ends = asyncio.run(run())
    failed = [delta for delta in ends if delta.finish_reason == "error"]
    assert (
        len(ends) == 24
        and failed
        and {delta.finish_reason for delta in ends} <= {"stop", "length", "error"}
    )
    assert {(delta.error, delta.error_param) for delta in failed} == {
        ("stop_when.pattern takes too long", "stop_when")
    }


def test_a_job_brings_the_answers_of_an_earlier_sitting(llm: LLM) -> None:
    """As `monkeys --stop-when` does: what is known may be enough."""
    for known, cut in ((["4", "4"], True), (["4", "5", None], False)):
        group_stop = GroupStop(lambda text: None, 2, known)
        prompt = Prompt(
            key=0, prompt=PROMPT, params=params_of(n=4, max_tokens=3), group_stop=group_stop
        )
        ended = [finished.output for finished in llm.stream([prompt])]
        assert group_stop.over is cut and len(ended) == 4
        assert all(
            output is not None and (output.finish_reason == "abort") is cut for output in ended
        )


def test_a_pattern_that_takes_too_long_ends_its_request_with_a_line(llm: LLM) -> None:
    asked = StopWhen(
        pattern=r"(?:\w|\W|.)+(?:\w|\W|.)+(?:\w|\W|.)+(?:\w|\W|.)+(?:\w|\W|.)+(?:\w|\W|.)+$^x"
    )
    slow, free = llm.generate(
        [PROMPT, [9, 8]], [params_of(stop_when=asked), params_of(n=1)], use_tqdm=False
    )
    assert (
        slow.error
        == "stop_when.pattern takes too long on a sample: write it without repeats inside repeats"
    )
    assert Counter(sample.finish_reason for sample in slow.outputs)["abort"] > 0
    assert free.error is None and free.outputs[0].text


@pytest.mark.parametrize(
    "pattern", ["(", "a{1000000000}", "[ab]{99}{99}{99}", "(" * 1500, r"\L<x>", "(?(1)a)"]
)
def test_patterns_that_cannot_be_served_are_refused(llm: LLM, pattern: str) -> None:
    bad, good = llm.generate(
        [[5], [6]], [params_of(stop_when=StopWhen(pattern=pattern)), params_of(n=1)]
    )
    assert bad.error is not None and bad.error.startswith("stop_when.pattern ") and not bad.outputs
    assert good.error is None


@pytest.mark.parametrize(
    "knobs, said",
    [
        ({"stop_when": {"pattern": "x"}}, "must be a StopWhen"),
        ({"stop_when": StopWhen(pattern="x", agree=25)}, "agree is above n"),
        ({"stop_when": StopWhen(pattern="x"), "detokenize": False}, "needs text"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        params_of(**knobs)
    for wrong in (
        {"pattern": ""},
        {"pattern": "x" * 2049},
        {"pattern": "x", "agree": 0},
        {"pattern": "x", "agree": 1.0},
    ):
        with pytest.raises(UsageError, match="stop_when"):
            StopWhen(**wrong)


def test_what_a_pattern_finds() -> None:
    finds = AnswerPattern(r"answer: *(\d+)?").find
    assert (finds("the answer: 12, or answer: 13"), finds("answer: x"), finds("none")) == (
        "12",
        None,
        None,
    )
    assert AnswerPattern(r"#+.\d").find("a ##\n7") == "##\n7"
