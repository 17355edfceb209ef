"""The answer of /generative_scoring. It has one score per item, computed from deltas with the
labels' logprobs. Knows a call and deltas.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.engine.label_scores import label_probs
from penstock.request import Delta, PositionLogprobs
from penstock.server.openai.answer_objects import Score, Scores
from penstock.server.openai.answers import BaseAnswer


class ScoringAnswer(BaseAnswer):
    """The answer of /generative_scoring in one body; scores are not streamed."""

    prefix, whole, entries = "generative-scoring", Scores, "data"

    def choice(
        self, choice: int, delta: Delta, positions: Sequence[PositionLogprobs | None] | None
    ) -> bytes:
        assert self._call.scoring is not None
        score = Score(index=choice)
        # a request may be aborted before the item was scored
        if delta.finish_reason != "abort":
            probs = label_probs(delta, softmax=self._call.scoring.apply_softmax)
            score.score, score.label_probs = probs[0], probs
        if delta.weights_version is not None:
            score.weights_version = delta.weights_version
        return msgspec.json.encode(score)
