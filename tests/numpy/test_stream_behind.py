"""A stream whose reader is behind: what waits is merged, loses nothing, and is bounded by the samples."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from penstock.engine.async_client import BEHIND, Stream
from penstock.request import Delta


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


def test_many_samples_and_logprobs_stay_apart() -> None:
    stream, _ = stream_of([[Delta(1, index, "x", [1], "length") for index in range(5000)]] * 1 + [[]])
    assert len(read_all(stream)) == 5000
    stream, _ = stream_of([[Delta(1, 0, "x", [1], logprobs=[{}])] for _ in range(3000)])
    assert len(read_all(stream)) == 3000
