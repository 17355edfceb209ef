"""AsyncLLM: the tokens of LLM, as they grow; requests that are ended, refused, or begun when it is
too late."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engine_model import make_folder

from penstock import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    EngineArgs,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from penstock.errors import ContextLengthError, EngineError, UsageError

pytestmark = pytest.mark.torch

KNOBS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 8,
    "kv_cache_tokens": 2048,
}
PROMPTS: list[Any] = ["the pump lifts water", [40, 41, 42, 43], {"prompt": "12 + 30 ="}]
PARAMS = SamplingParams(n=3, max_tokens=12, seed=4, logprobs=1, ignore_eos=True)
LONG = SamplingParams(max_tokens=140, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def llm(folder: Path, loop: asyncio.Runner) -> Iterator[AsyncLLM]:
    made = AsyncLLM(str(folder), **KNOBS)
    yield made
    loop.run(made.shutdown())
    loop.run(made.shutdown())
    with pytest.raises(EngineError, match="shut down"):
        loop.run(made.start())


async def every(
    llm: AsyncLLM, prompt: Any, params: SamplingParams, name: str | None = None
) -> list[RequestOutput]:
    return [out async for out in llm.generate(prompt, params, name)]


def test_answers_grow_to_those_of_llm(folder: Path, loop: asyncio.Runner, llm: AsyncLLM) -> None:
    async def all_at_once() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(every(llm, prompt, PARAMS) for prompt in PROMPTS))

    grown = loop.run(all_at_once())
    with LLM(str(folder), **KNOBS) as other:
        wanted = other.generate(PROMPTS, PARAMS, use_tqdm=False)
    for outs, want in zip(grown, wanted, strict=True):
        assert len(outs) > 3 and [out.finished for out in outs] == [False] * (len(outs) - 1) + [
            True
        ]
        assert (outs[-1].prompt, outs[-1].prompt_token_ids) == (want.prompt, want.prompt_token_ids)
        for sample, whole in zip(outs[-1].outputs, want.outputs, strict=True):
            assert (sample.index, sample.token_ids, sample.text) == (
                whole.index,
                whole.token_ids,
                whole.text,
            )
            assert sample.finish_reason == whole.finish_reason == "length"
            assert (
                sample.logprobs == whole.logprobs
                and sample.cumulative_logprob == whole.cumulative_logprob
            )
            assert sample.weights_version == whole.weights_version == "default"
            for mine, theirs in zip(sample.logprobs.columns, whole.logprobs.columns, strict=True):
                assert (
                    mine.dtype == theirs.dtype
                    and mine.shape == theirs.shape
                    and (mine == theirs).all()
                )
        first, later = (out.outputs[0] for out in outs[-2:])
        assert first.token_ids is later.token_ids, "a step copied all tokens"
        assert (
            len(first.logprobs) <= len(later.logprobs)
            and later.logprobs[: len(first.logprobs)] == first.logprobs
        )
        texts = [out.outputs[0].text for out in outs if out.outputs and out.outputs[0].index == 0]
        assert all(later.startswith(text) for text, later in pairwise(texts))


def test_requests_that_are_ended(loop: asyncio.Runner, llm: AsyncLLM) -> None:
    async def run() -> tuple[list[RequestOutput], int]:
        seen = []
        async for out in llm.generate([9, 10, 11], LONG, "mine"):
            seen.append(out)
            with pytest.raises(UsageError, match="is under way"):
                await every(llm, [9], LONG, "mine")
            await llm.abort("mine")
            await llm.abort(["nobody's"])
        left = 0
        async for _ in llm.generate([9, 10, 11], LONG):
            left += 1
            break
        return seen, left

    seen, left = loop.run(run())
    assert left == 1 and [out.finished for out in seen] == [False] * (len(seen) - 1) + [True]
    last, before = seen[-1].outputs[0], seen[-2].outputs[0]
    assert (
        last.finish_reason == "abort"
        and last.token_ids == before.token_ids
        and len(last.token_ids) < 140
    )


def test_what_cannot_run_is_refused(loop: asyncio.Runner, llm: AsyncLLM) -> None:
    for prompt, error in (
        ([5] * 200, ContextLengthError),
        ([True], UsageError),
        ([], UsageError),
        (["a", "b"], UsageError),
    ):
        with pytest.raises(error):
            loop.run(every(llm, prompt, PARAMS))
    assert loop.run(llm.reset_prefix_cache()) is True
    assert loop.run(every(llm, [5, 6], PARAMS))[-1].finished


def test_a_start_that_fails_says_why(loop: asyncio.Runner, tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(str(tmp_path)):
            pass

    with pytest.raises(Exception, match=r"config\.json"):
        loop.run(run())


def test_what_is_new_and_what_is_whole_make_the_same(loop: asyncio.Runner, llm: AsyncLLM) -> None:
    def of(kind: RequestOutputKind, **more: Any) -> list[RequestOutput]:
        asked = SamplingParams(
            n=3, max_tokens=12, seed=4, logprobs=1, ignore_eos=True, output_kind=kind, **more
        )
        return loop.run(every(llm, PROMPTS[0], asked))

    for more in ({}, {"stop": ["pump", "e"], "min_tokens": 2}):
        (once,) = of(RequestOutputKind.FINAL_ONLY, **more)
        whole, news = of(RequestOutputKind.CUMULATIVE, **more), of(RequestOutputKind.DELTA, **more)
        assert once.outputs == whole[-1].outputs and once.finished and whole[-1].finished
        assert len(news) > 1 and [out.finished for out in news] == [False] * (len(news) - 1) + [
            True
        ]
        for sample in once.outputs:
            parts = [part for out in news for part in out.outputs if part.index == sample.index]
            assert "".join(part.text for part in parts) == sample.text
            assert [token for part in parts for token in part.token_ids] == sample.token_ids
            assert [scores for part in parts for scores in part.logprobs or ()] == sample.logprobs
            assert (
                parts[-1].cumulative_logprob
                == sample.cumulative_logprob
                == pytest.approx(
                    sum(
                        scores[token].logprob
                        for scores, token in zip(sample.logprobs, sample.token_ids, strict=True)
                    )
                )
            )
            assert parts[-1].finish_reason == sample.finish_reason


def test_an_aborted_request_says_what_it_made_in_every_kind(
    loop: asyncio.Runner, llm: AsyncLLM
) -> None:
    async def run(kind: RequestOutputKind) -> list[RequestOutput]:
        asked = SamplingParams(n=2, max_tokens=140, ignore_eos=True, output_kind=kind)
        reading = asyncio.ensure_future(every(llm, [9, 10, 11], asked, "mine"))
        while not llm._streams:
            await asyncio.sleep(0)
        async for _ in llm.generate([9, 10, 11], SamplingParams(max_tokens=2, ignore_eos=True)):
            pass
        await llm.abort("mine")
        return await reading

    for kind in RequestOutputKind:
        outs = loop.run(run(kind))
        assert [sample.finish_reason for sample in outs[-1].outputs] == ["abort", "abort"], kind
        assert outs[-1].finished and all(sample.stop_reason is None for sample in outs[-1].outputs)
        made = [len(sample.token_ids) for out in outs for sample in out.outputs]
        assert 0 < max(made) < 140
        if kind is RequestOutputKind.FINAL_ONLY:
            assert len(outs) == 1 and len(made) == 2 and min(made) > 0


def test_made_by_engine_args_and_looked_after(folder: Path, loop: asyncio.Runner) -> None:
    args = AsyncEngineArgs(model=str(folder), disable_log_stats=True, **KNOBS)
    assert args.max_num_seqs == 8 and isinstance(args, EngineArgs)

    async def run() -> None:
        made = AsyncLLM.from_engine_args(args)
        await made.check_health()
        assert made.weights_version == "default"
        await made.start()
        await made.check_health()
        client = await made._ready()
        client._process.kill()
        with pytest.raises(EngineError):
            await every(made, [5, 6], LONG)
        with pytest.raises(EngineError, match="process"):
            await made.check_health()
        await made.shutdown()
        with pytest.raises(EngineError, match="shut down"):
            await made.check_health()

    loop.run(run())
    with LLM.from_engine_args(EngineArgs(str(folder), **KNOBS)) as other:
        assert other.facts.max_num_seqs == 8
    with pytest.raises(UsageError, match="max_nun_seqs"):
        EngineArgs(max_nun_seqs=8)
    with pytest.raises(UsageError, match="EngineArgs"):
        AsyncLLM.from_engine_args({"model": "demo"})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="output_kind"):
        SamplingParams(output_kind="delta")  # type: ignore[arg-type]
