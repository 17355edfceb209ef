"""The answer of /inference/v1/generate. It has token ids and no text; logprobs come as in chats or
in columns. Knows a call, deltas and JSON; no engine, no HTTP.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.engine.logprobs import LazyLogprobs
from penstock.request import Delta
from penstock.server.openai.answer_objects import (
    Generated,
    GeneratedChoice,
    GeneratedChunk,
    GeneratedLogprobs,
)
from penstock.server.openai.answers import BaseAnswer
from penstock.server.openai.logprobs_json import (
    LOWEST,
    TokenSpellings,
    chat_logprobs,
    prompt_logprobs,
)

if TYPE_CHECKING:
    from penstock.server.openai.prompt_ids import TokenizedPrompt
    from penstock.server.openai.translate import Call


class GenerateAnswer(BaseAnswer):
    """vLLM's GenerateResponse and its events, for a single prompt. The answer doesn't repeat the
    prompt's ids."""

    prefix = "gen"
    whole: Any = Generated
    chunk = GeneratedChunk
    tells_prompt = False

    def __init__(self, call: Call, model: str, spellings: TokenSpellings) -> None:
        super().__init__(call, model, spellings)
        assert call.tokens_only is not None, "only a call of token ids is answered in them"
        self.id, self._columns = call.tokens_only.request_id or self.id, call.tokens_only.columns

    @staticmethod
    def choice_of(
        index: int, content: str, logprobs: Any, *, finish_reason: Any, stop_reason: Any
    ) -> GeneratedChoice:
        return GeneratedChoice(
            index, logprobs, finish_reason=finish_reason, stop_reason=stop_reason
        )

    part_of = choice_of

    def _head(self) -> dict[str, Any]:
        return {"request_id": self.id, "created": self.created, "model": self.model}

    def _content(self, choice: int, prompt: TokenizedPrompt, delta: Delta) -> str:
        return ""

    def _part(self, text: str, *, first: bool) -> str:
        return ""

    def _logprobs(
        self, choice: int, prompt: TokenizedPrompt, delta: Delta, positions: Any, *, first: bool
    ) -> bytes:
        scores, top = delta.logprobs or [], self._call.logprobs or 0
        if self._columns:
            return msgspec.json.encode(columns_of(delta.token_ids, scores, top))
        return chat_logprobs(delta.token_ids, scores, self._spell, top)

    def _about_prompt(self, prompt: TokenizedPrompt, positions: Any) -> dict[str, msgspec.Raw]:
        if self._call.prompt_logprobs is not None and positions is not None:
            found = msgspec.Raw(msgspec.json.encode(prompt_logprobs(positions, self._spell)))
            self.whole = partial(Generated, prompt_logprobs=found)
        return {}


def columns_of(ids: list[int], scores: Any, top: int) -> GeneratedLogprobs:
    """Returns the logprobs of the tokens `ids` as one list per field: each token's own logprob and
    rank, and the `top` likeliest ids with their logprobs. An id of -1 means none."""
    if isinstance(scores, LazyLogprobs):
        _, chosen, rank, likely, values = scores.columns
        return GeneratedLogprobs(
            logprobs=np.fmax(chosen, LOWEST).tolist(),
            ranks=rank.tolist(),
            top_token_ids=likely[:, :top].tolist(),
            top_logprobs=np.fmax(values[:, :top], LOWEST).tolist(),
        )
    own = [position[token] for token, position in zip(ids, scores, strict=True)]
    best = [
        sorted((each.rank, token, each.logprob) for token, each in found.items())
        for found in scores
    ]
    return GeneratedLogprobs(
        logprobs=[each.logprob for each in own],
        ranks=[each.rank for each in own],
        top_token_ids=[[token for rank, token, _ in found if rank <= top] for found in best],
        top_logprobs=[[value for rank, _, value in found if rank <= top] for found in best],
    )
