"""PromptOutputs: reports on each request's prompt. One report (PromptNews) per request has the
number of cached tokens, and the prompt's logprobs if requested.

It is sent when the step is read in which the request's first sample got a row: by then all chunks
of the prompt have been read. Knows chunks and scores; not rows.
"""

from __future__ import annotations

import numpy as np

from penstock.schedule.admission import Admitted, Chunk
from penstock.schedule.deltas import PromptNews
from penstock.schedule.request_state import RequestState
from penstock.schedule.step import StepPlan, StepTokens, TokenLogprobs


class PromptOutputs:
    """Makes the reports on prompts (PromptNews) as steps are read."""

    def __init__(self) -> None:
        self._launched: dict[int, Admitted] = {}

    def launched(self, number: int, admitted: Admitted) -> None:
        """Notes the samples that join in step `number`, and its prompt chunks."""
        if admitted.pieces or admitted.chunks:
            self._launched[number] = admitted

    def read(self, plan: StepPlan, result: StepTokens) -> list[PromptNews]:
        """Stores the prompt logprobs of a read step; returns the reports of requests whose first
        sample joined in it."""
        admitted = self._launched.pop(plan.number, None)
        if admitted is None:
            return []
        _take_scores(admitted.chunks, result.prompt_logprobs)
        news = []
        for live in (piece.group.live for piece in admitted.pieces):
            if live.news:
                live.news = False
                news.append(_news(live))
        return news


def _take_scores(chunks: list[Chunk], scores: TokenLogprobs | None) -> None:
    """Stores the prompt logprobs of each request's chunks, with indices into its prompt."""
    at = 0
    for chunk in chunks:
        live, stop = chunk.group.live, at + chunk.stop - chunk.start
        if live.prompt_logprobs >= 0 and not chunk.group.resumed:
            assert scores is not None, "a scored chunk came back without scores"
            mine = np.flatnonzero((scores.where >= at) & (scores.where < stop))
            where = scores.where[mine] + np.int32(chunk.start - at)
            top_ids, top = scores.top_ids[mine], scores.top[mine]
            live.scored.append(
                TokenLogprobs(where, scores.chosen[mine], scores.rank[mine], top_ids, top)
            )
        at = stop


def _news(live: RequestState) -> PromptNews:
    if live.prompt_logprobs < 0:
        return PromptNews(live.request_id, live.cached_tokens, waited=live.waited)
    count, width = live.prompt_length - 1, live.prompt_logprobs
    chosen, rank = np.full(count, np.nan, np.float32), np.zeros(count, np.int32)
    top_ids, top = (
        np.full((count, width), -1, np.int32),
        np.full((count, width), np.nan, np.float32),
    )
    parts, live.scored = live.scored, []
    for (
        part
        # stored by index in the prompt, because a group that was queued again is prefilled and
        # scored twice
    ) in parts:
        chosen[part.where], rank[part.where] = part.chosen, part.rank
        top_ids[part.where], top[part.where] = part.top_ids[:, :width], part.top[:, :width]
    return PromptNews(live.request_id, live.cached_tokens, chosen, rank, top_ids, top, live.waited)
