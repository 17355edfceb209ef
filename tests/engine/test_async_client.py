"""A stream whose reader is behind: what waits is merged, loses nothing, and is bounded by the
samples."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest

from penstock.engine.logprobs import LazyLogprobs
from penstock.engine.request_stream import BEHIND, SCORED, Stream
from penstock.errors import EngineError
from penstock.request import Delta
from penstock.schedule.deltas import GOES_ON, NO_STOP_ID, Deltas
from penstock.server.online.active_call import _merged


def read_all(stream: Stream) -> list[Delta]:
    async def read() -> list[Delta]:
        return [delta async for news in stream for delta in news]

    return asyncio.run(read())


def stream_of(steps: list[list[Delta]]) -> tuple[Stream, int]:
    """With all of it pushed before anybody reads, and the most deltas that lay there."""
    nothing: Any = None
    stream, most = Stream(nothing, lambda asked: None), 0
    for step in steps:
        stream.push(step)
        most = max(most, len(stream._news))
    stream.end()
    return stream, most


def test_merged_deltas_are_the_same_text_and_tokens() -> None:
    random.seed(5)
    steps, text, tokens = [], dict.fromkeys(range(8), ""), {index: [] for index in range(8)}
    for step in range(3000):
        news = []
        for index in range(8):
            if random.random() < 0.8:
                word, ids = f"{step}é ", [step, index][: random.randint(0, 2)]
                news.append(Delta(1, index, word, list(ids)))
                text[index] += word
                tokens[index] += ids
        steps.append(news)
    steps.append([Delta(1, index, "", [], "stop", f"end {index}") for index in range(8)])
    stream, most = stream_of(steps)
    assert most <= BEHIND + 8
    got_text, got_tokens, ends = dict.fromkeys(range(8), ""), {index: [] for index in range(8)}, {}
    for delta in read_all(stream):
        assert delta.index not in ends
        got_text[delta.index] += delta.text
        got_tokens[delta.index] += delta.token_ids
        if delta.finish_reason is not None:
            ends[delta.index] = delta.stop_reason
    assert (got_text, got_tokens) == (text, tokens)
    assert ends == {index: f"end {index}" for index in range(8)}


def test_a_reader_that_keeps_up_gets_each_by_itself() -> None:
    stream, _ = stream_of([[Delta(1, 0, "a")], [Delta(1, 0, "b")]])
    assert [delta.text for delta in read_all(stream)] == ["a", "b"]


def message(step: int, rows: int, k: int = 2) -> Deltas:
    """A step's, of a token of each of `rows` samples of request 1."""
    index = np.arange(rows, dtype=np.int32)
    return Deltas(
        request=np.ones(rows, np.int64),
        sample=index,
        finish=np.full(rows, GOES_ON, np.int8),
        stop_id=np.full(rows, NO_STOP_ID, np.int32),
        start=np.arange(rows + 1, dtype=np.int32),
        tokens=index + step,
        chosen=np.full(rows, -step, np.float32),
        rank=index + 1,
        top_ids=np.tile(np.arange(k, dtype=np.int32) + step, (rows, 1)),
        top=np.full((rows, k), -0.5 * step, np.float32),
    )


def test_logprobs_are_merged_and_keep_no_message_alive() -> None:
    """Two samples of one slow stream, whose messages bring a hundred other rows."""
    nothing: Any = None
    stream, steps, kept, most = Stream(nothing, lambda asked: None), 3000, [], 0
    whole: dict[int, list[LazyLogprobs]] = {0: [], 1: []}
    for step in range(steps):
        up = message(step, 100)
        assert up.top is not None
        kept.append(weakref.ref(up.top))
        scores = [LazyLogprobs.of(up, index, 2, None, brief=True) for index in whole]
        stream.push(
            [
                Delta(1, index, "x", [index + step], logprobs=each)
                for index, each in enumerate(scores)
            ]
        )
        for index, each in enumerate(scores):
            whole[index].append(each.apart())
        most = max(most, len(stream._news))
        del up, scores, each
    # the first, which came while nobody was behind
    assert sum(array() is not None for array in kept) <= 1
    assert most <= BEHIND + 2
    stream.end()
    got: dict[int, list[Delta]] = {0: [], 1: []}
    for delta in read_all(stream):
        assert (
            delta.logprobs is not None
            and len(delta.logprobs) == len(delta.token_ids) == len(delta.text) <= SCORED
        )
        got[delta.index].append(delta)
    for index, deltas in got.items():
        assert [token for delta in deltas for token in delta.token_ids] == [
            index + step for step in range(steps)
        ]
        assert [at for delta in deltas for at in delta.logprobs or ()] == list(
            LazyLogprobs.joined(whole[index])
        )


def test_logprobs_of_a_reader_that_keeps_up_are_not_copied() -> None:
    scores = LazyLogprobs.of(message(0, 4), 1, 2, None, brief=True)
    stream, _ = stream_of([[Delta(1, 1, "x", [1], logprobs=scores)]])
    (delta,) = read_all(stream)
    assert delta.logprobs is scores


def test_a_slow_reader_of_several_prompts_has_its_news_merged() -> None:
    nothing: Any = None
    steps = 3 * BEHIND

    async def run() -> tuple[int, list[str]]:
        streams = [Stream(nothing, lambda asked: None) for _ in range(2)]
        news = _merged(streams)
        texts, most = ["", ""], 0
        for number in range(steps):
            for stream in streams:
                stream.push([Delta(1, 0, f"{number} ", [number])])
            if not number:
                for at, deltas in await anext(news):
                    texts[at] += "".join(delta.text for delta in deltas)
            for _ in range(3):  # who would take it away has every chance to
                await asyncio.sleep(0)
        for stream in streams:
            stream.end()
        async for step in news:
            for at, deltas in step:
                most += len(deltas)
                texts[at] += "".join(delta.text for delta in deltas)
        return most, texts

    count, texts = asyncio.run(run())
    assert count <= 2 * (BEHIND + 4)
    assert texts == ["".join(f"{number} " for number in range(steps))] * 2


def test_a_slow_reader_of_several_prompts_is_told_of_an_error() -> None:
    nothing: Any = None

    async def run() -> None:
        streams = [Stream(nothing, lambda asked: None) for _ in range(2)]
        news = _merged(streams)
        for stream in streams:
            stream.push([Delta(1, 0, "a")])
        assert len(await anext(news)) == 2
        for _ in range(3):
            streams[1].push([Delta(1, 0, "b")])
            await asyncio.sleep(0)
        streams[1].end(EngineError("it died"))
        with pytest.raises(EngineError, match="it died"):
            async for _ in news:
                pass

    asyncio.run(run())


def test_who_listened_is_free_at_the_end() -> None:
    """Without the collector: it would look through the lines of thousands of rows at once, and hold
    the loop for it."""

    class Line:
        def __init__(self) -> None:
            self.heard = 0
            nothing: Any = None
            self.stream = Stream(nothing, lambda asked: None)
            self.stream.listen(self.hear)

        def hear(self) -> None:
            self.heard += 1

    gc.disable()
    try:
        line = Line()
        line.stream.push([Delta(1, 0, token_ids=[5], finish_reason="stop")])
        line.stream.end()
        assert line.heard == 2
        news, over = line.stream.take()
        line.stream.listen(line.hear)  # too late: there is nothing to come
        assert over and len(news) == 1 and line.heard == 3
        held = weakref.ref(line)
        del line
        assert held() is None
    finally:
        gc.enable()
