"""The answer of /generative_scoring. It has one score per item, computed from deltas with the
labels' logprobs. Knows a call and deltas.

{"object": "list", "data": [{"index": 0, "object": "score", "score": 0.9, "label_probs": [...]}],
"usage": ...}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.engine.label_scores import label_probs
from penstock.request import Delta, PositionLogprobs
from penstock.server.openai.answers import BaseAnswer


class ScoringAnswer(BaseAnswer):
    """The answer of /generative_scoring in one body; scores are not streamed."""

    prefix, kind, entries = "generative-scoring", "list", "data"

    def choice(
        self, choice: int, delta: Delta, positions: Sequence[PositionLogprobs | None] | None
    ) -> bytes:
        assert self._call.scoring is not None
        told: dict[str, Any] = {
            "index": choice,
            "object": "score",
            "score": None,
            "label_probs": None,
        }
        # a request may be aborted before the item was scored
        if delta.finish_reason != "abort":
            told["label_probs"] = probs = label_probs(
                delta, softmax=self._call.scoring.apply_softmax
            )
            told["score"] = probs[0]
        if delta.weights_version is not None:
            told["weights_version"] = delta.weights_version
        return msgspec.json.encode(told)
