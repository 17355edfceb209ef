"""One request that our own code fails at ends alone: in text, in stop strings, in a stream's
events, in the engine."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_process import open_fake
from fake_runner import Orders, expected
from in_loop import Events, Here, close, post, serving_here
from service import HANG, make_folder

from penstock.config import Config
from penstock.engine.sample_decoder import SampleDecoder
from penstock.request import Request, SamplingParams

pytestmark = pytest.mark.torch

BAD = [7, 7, 7]


def body(number: int, **more: Any) -> dict[str, Any]:
    prompt = BAD if number == 3 else [number + 20] * 9
    return {"prompt": prompt, "max_tokens": 12, "seed": number, "return_token_ids": True, **more}


async def answers(here: Here, count: int, **more: Any) -> list[tuple[int, Any]]:
    """(status, choices' ids or the error's code) of so many requests at once; the third is the bad
    one."""

    async def one(number: int) -> tuple[int, Any]:
        reader, writer = await post(here.port, body(number, **more))
        if more.get("stream"):
            events = Events(reader)
            await events.read()
            await close(writer)
            return 200, events.error or (events.ids[0] if events.whole else "torn")
        head, _, data = (await reader.read()).partition(b"\r\n\r\n")
        await close(writer)
        said = json.loads(data)
        return int(head.split()[1]), (
            said["error"]["code"] if "error" in said else said["choices"][0]["token_ids"]
        )

    return list(await asyncio.gather(*(one(number) for number in range(count))))


async def check(here: Here, words: list[int], status: int, **more: Any) -> None:
    got = await answers(here, 8, **more)
    want = [(200, expected(body(n)["prompt"], 12, words, n)) for n in range(8)]
    want[3] = (status, "internal")
    assert got == want
    left = await here.rest(HANG)
    assert not any(left.values()), left
    assert here.client.alive


class BrokenTokenizer:
    """Fails at the texts of the bad request."""

    def __init__(self, tokenizer: Any, bad: list[int]) -> None:
        self._tokenizer, self._bad = tokenizer, bad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int], **how: Any) -> str:
        if list(ids) == self._bad:
            raise ZeroDivisionError("secret")
        text: str = self._tokenizer.decode(ids, **how)
        return text

    def decode_batch(self, every: list[list[int]], **how: Any) -> list[str]:
        return [self.decode(ids, **how) for ids in every]


def run(folder: Path, work: Any) -> None:
    words = make_folder(folder, Orders(step_seconds=0.002))

    async def main() -> None:
        async with serving_here(folder) as here:
            await work(here, words)

    asyncio.run(asyncio.wait_for(main(), HANG))


def test_whole_texts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(here: Here, words: list[int]) -> None:
        bad = expected(BAD, 12, words, 3)
        here.client._client.tokenizer = BrokenTokenizer(here.client.tokenizer, bad)  # type: ignore[assignment]
        await check(here, words, 500)

    run(tmp_path, work)
    (record,) = (r for r in caplog.records if r.levelno >= logging.ERROR)
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError


@pytest.mark.parametrize("more", [{"stream": True}, {"stop": ["never in it"]}])
def test_text_that_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    plain = SampleDecoder.take

    def take(self: SampleDecoder, request_id: int, *news: Any) -> Any:
        if self.params.seed == 3:
            raise ZeroDivisionError("secret")
        return plain(self, request_id, *news)

    monkeypatch.setattr(SampleDecoder, "take", take)
    run(tmp_path, lambda here, words: check(here, words, 200 if "stream" in more else 500, **more))


def test_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from penstock.server.openai.answers import CompletionAnswer

    plain = CompletionAnswer.event

    def event(self: CompletionAnswer, *news: Any) -> bytes:
        if self._call.prompts[0].ids == BAD:
            raise ZeroDivisionError("secret")
        return plain(self, *news)

    monkeypatch.setattr(CompletionAnswer, "event", event)
    run(tmp_path, lambda here, words: check(here, words, 200, stream=True))
    assert any(r.exc_info and r.exc_info[0] is ZeroDivisionError for r in caplog.records)


def test_logits_that_are_not_finite_end_who_ran_and_nobody_else(tmp_path: Path) -> None:
    from fake_runner import write_orders

    async def work(here: Here, words: list[int]) -> None:
        write_orders(tmp_path, Orders(step_seconds=0.002, fault="nan", serial=1))
        got = await answers(here, 8)
        assert {status for status, _ in got} <= {200, 500} and (500, "numerical_error") in got
        want = [(200, expected(body(n)["prompt"], 12, words, n)) for n in range(8)]
        assert await answers(here, 8) == want
        assert not any((await here.rest(HANG)).values()) and here.client.alive

    run(tmp_path, work)


def test_the_engine_refuses_what_its_scheduler_fails_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_folder(tmp_path)
    engine, _ = open_fake(Config.of(model=str(tmp_path)))

    def ask(number: int) -> Request:
        prompt = np.array([1, 2, 3], np.int32).tobytes()
        return Request(
            request_id=number, prompt=prompt, sampling=SamplingParams(max_tokens=4), stream=False
        )

    plain = engine.scheduler.watch.hold

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("secret")

    engine.scheduler.watch.hold = fail  # type: ignore[method-assign]
    bad = ask(0)
    bad.watch = b"x"
    refused = engine.submit(bad)
    assert (
        refused is not None
        and refused.error.kind == "FaultError"
        and "secret" not in refused.error.message
    )
    assert caplog.records[-1].exc_info is not None and not engine.has_work
    engine.scheduler.watch.hold = plain  # type: ignore[method-assign]
    assert engine.submit(ask(1)) is None
    made = 0
    while engine.has_work:
        deltas = engine.step()
        made += deltas.tokens.size if deltas is not None else 0
    assert made == 4
    engine.scheduler.groups = SimpleNamespace(add=fail)  # type: ignore[assignment]
    with pytest.raises(
        ZeroDivisionError
    ):  # the request is in the columns already: nothing can be trusted any more
        engine.submit(ask(2))
