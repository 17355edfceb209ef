"""AsyncLLM: the tokens of LLM, as they grow; requests that are ended, refused, or begun when it is too late."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engine_model import make_folder

from penstock import LLM, AsyncLLM, RequestOutput, SamplingParams
from penstock.errors import ContextLengthError, EngineError, UsageError

pytestmark = pytest.mark.torch

KNOBS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "kv_cache_tokens": 2048}
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


async def every(llm: AsyncLLM, prompt: Any, params: SamplingParams, name: str | None = None) -> list[RequestOutput]:
    return [out async for out in llm.generate(prompt, params, name)]


def test_answers_grow_to_those_of_llm(folder: Path, loop: asyncio.Runner, llm: AsyncLLM) -> None:
    async def all_at_once() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(every(llm, prompt, PARAMS) for prompt in PROMPTS))

    grown = loop.run(all_at_once())
    with LLM(str(folder), **KNOBS) as other:
        wanted = other.generate(PROMPTS, PARAMS, use_tqdm=False)
    for outs, want in zip(grown, wanted, strict=True):
        assert len(outs) > 3 and [out.finished for out in outs] == [False] * (len(outs) - 1) + [True]
        assert (outs[-1].prompt, outs[-1].prompt_token_ids) == (want.prompt, want.prompt_token_ids)
        for sample, whole in zip(outs[-1].outputs, want.outputs, strict=True):
            assert (sample.index, sample.token_ids, sample.text) == (whole.index, whole.token_ids, whole.text)
            assert sample.finish_reason == whole.finish_reason == "length"
            assert sample.logprobs is not None and len(sample.logprobs) == 12
        texts = [out.outputs[0].text for out in outs if out.outputs and out.outputs[0].index == 0]
        assert all(later.startswith(text) for text, later in pairwise(texts))


def test_requests_that_are_ended(loop: asyncio.Runner, llm: AsyncLLM) -> None:
    async def run() -> tuple[list[RequestOutput], int]:
        seen = []
        async for out in llm.generate([9, 10, 11], LONG, "mine"):
            seen.append(out)
            with pytest.raises(UsageError, match="is under way"):
                await every(llm, [9], LONG, "mine")
            llm.abort("mine")
            llm.abort("nobody's")
        left = 0
        async for _ in llm.generate([9, 10, 11], LONG):
            left += 1
            break
        return seen, left

    seen, left = loop.run(run())
    assert left == 1 and [out.finished for out in seen] == [False] * (len(seen) - 1) + [True]
    last, before = seen[-1].outputs[0], seen[-2].outputs[0]
    assert last.finish_reason == "abort" and last.token_ids == before.token_ids and len(last.token_ids) < 140


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
