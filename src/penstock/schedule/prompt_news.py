"""PromptNewsDesk: what is told of a prompt, once a request: its cached tokens, and its logprobs where asked for.

It waits until the flight is read in which the request's first tail joined: all chunks of the prompt were read by then.
It knows chunks and scores; not rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.schedule.admission import Chunk
from penstock.schedule.deltas import PromptNews
from penstock.schedule.groups import ForkGroup, LiveRequest
from penstock.schedule.step import StepPlan, StepTokens, TokenLogprobs


class _Scored(NamedTuple):
    live: LiveRequest
    start: int  # of the chunk in the step's tokens
    stop: int


class PromptNewsDesk:
    """Collects by flight."""

    def __init__(self) -> None:
        self._chunks: dict[int, list[_Scored]] = {}
        self._joined: dict[int, list[LiveRequest]] = {}

    def launched(self, number: int, chunks: list[Chunk]) -> None:
        """Flight `number` prefills these chunks, some of them scored."""
        at, scored = 0, []
        for chunk in chunks:
            size = chunk.stop - chunk.start
            if chunk.group.live.prompt_logprobs >= 0 and not chunk.group.resumed:
                scored.append(_Scored(chunk.group.live, at, at + size))
            at += size
        self._chunks[number] = scored

    def joined(self, number: int, groups: list[ForkGroup]) -> None:
        """Tails of these groups join in flight `number`."""
        lives = [group.live for group in groups if group.live.news]
        for live in lives:
            live.news = False
        if lives:
            self._joined[number] = lives

    def scored(self, plan: StepPlan, result: StepTokens) -> None:
        """Takes the prompt logprobs of a read flight."""
        scores = result.prompt_logprobs
        for live, start, stop in self._chunks.pop(plan.number, ()):
            assert scores is not None, "a scored chunk came back without scores"
            mine = np.flatnonzero((scores.where >= start) & (scores.where < stop))
            live.scored.append(
                TokenLogprobs(
                    scores.where[mine], scores.chosen[mine], scores.rank[mine], scores.top_ids[mine], scores.top[mine]
                )
            )

    def take(self, number: int) -> list[PromptNews]:
        """News of the requests whose first tail joined in flight `number`."""
        return [_news(live) for live in self._joined.pop(number, ())]


def _news(live: LiveRequest) -> PromptNews:
    if live.prompt_logprobs < 0:
        return PromptNews(live.request_id, live.cached_tokens)
    width = live.prompt_logprobs
    parts, live.scored = live.scored, []
    return PromptNews(
        request=live.request_id,
        cached_tokens=live.cached_tokens,
        chosen=np.concatenate([p.chosen for p in parts]) if parts else np.zeros(0, np.float32),
        rank=np.concatenate([p.rank for p in parts]) if parts else np.zeros(0, np.int32),
        top_ids=np.concatenate([p.top_ids[:, :width] for p in parts]) if parts else np.zeros((0, width), np.int32),
        top=np.concatenate([p.top[:, :width] for p in parts]) if parts else np.zeros((0, width), np.float32),
    )
