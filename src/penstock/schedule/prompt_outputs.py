"""PromptOutputs: what is told of a prompt, once a request: its cached tokens, and its logprobs where asked for.

It waits until the flight is read in which the request's first tail joined: all chunks of the prompt were read by then.
It knows chunks and scores; not rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.schedule.admission import Chunk
from penstock.schedule.deltas import PromptNews
from penstock.schedule.request_state import ForkGroup, RequestState
from penstock.schedule.step import StepPlan, StepTokens, TokenLogprobs


class _Scored(NamedTuple):
    live: RequestState
    start: int  # of the chunk in the step's tokens
    stop: int
    first: int  # of the chunk in the prompt


class PromptOutputs:
    """Collects by flight."""

    def __init__(self) -> None:
        self._chunks: dict[int, list[_Scored]] = {}
        self._joined: dict[int, list[RequestState]] = {}

    def launched(self, number: int, chunks: list[Chunk]) -> None:
        """Flight `number` prefills these chunks, some of them scored."""
        at, scored = 0, []
        for chunk in chunks:
            size = chunk.stop - chunk.start
            if chunk.group.live.prompt_logprobs >= 0 and not chunk.group.resumed:
                scored.append(_Scored(chunk.group.live, at, at + size, chunk.start))
            at += size
        self._chunks[number] = scored

    def joined(self, number: int, groups: list[ForkGroup]) -> None:
        """Tails of these groups join in flight `number`."""
        lives = []
        for group in groups:  # a group may stand here twice: it joined before and after this step's prefill
            if group.live.news:
                group.live.news = False
                lives.append(group.live)
        if lives:
            self._joined[number] = lives

    def scored(self, plan: StepPlan, result: StepTokens) -> None:
        """Takes the prompt logprobs of a read flight."""
        scores = result.prompt_logprobs
        for live, start, stop, first in self._chunks.pop(plan.number, ()):
            assert scores is not None, "a scored chunk came back without scores"
            mine = np.flatnonzero((scores.where >= start) & (scores.where < stop))
            live.scored.append(
                TokenLogprobs(
                    scores.where[mine] + np.int32(first - start),
                    scores.chosen[mine],
                    scores.rank[mine],
                    scores.top_ids[mine],
                    scores.top[mine],
                )
            )

    def take(self, number: int) -> list[PromptNews]:
        """News of the requests whose first tail joined in flight `number`."""
        return [_news(live) for live in self._joined.pop(number, ())]


def _news(live: RequestState) -> PromptNews:
    if live.prompt_logprobs < 0:
        return PromptNews(live.request_id, live.cached_tokens, waited=live.waited)
    count, width = live.prompt_length - 1, live.prompt_logprobs
    chosen, rank = np.full(count, np.nan, np.float32), np.zeros(count, np.int32)
    top_ids, top = np.full((count, width), -1, np.int32), np.full((count, width), np.nan, np.float32)
    parts, live.scored = live.scored, []
    for part in parts:  # by their place in the prompt: a group that was requeued is prefilled and scored twice
        chosen[part.where], rank[part.where] = part.chosen, part.rank
        top_ids[part.where], top[part.where] = part.top_ids[:, :width], part.top[:, :width]
    return PromptNews(live.request_id, live.cached_tokens, chosen, rank, top_ids, top, live.waited)
