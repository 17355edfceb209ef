"""The answer of /inference/v1/generate. It has token ids and no text; logprobs come as in chats or
in columns. Knows a call, deltas and JSON; no engine, no HTTP.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.engine.logprobs import LazyLogprobs
from penstock.request import Delta
from penstock.server.openai.answers import BaseAnswer
from penstock.server.openai.logprobs_json import LOWEST, chat_logprobs, prompt_logprobs
from penstock.server.openai.tool_forms import Json

if TYPE_CHECKING:
    from penstock.server.openai.prompt_ids import TokenizedPrompt

_encode = msgspec.json.Encoder().encode


class GenerateAnswer(BaseAnswer):
    """vLLM's GenerateResponse and its events, for a single prompt. The answer doesn't repeat the
    prompt's ids."""

    tells_prompt = False
    _of_prompt = b"null"

    def _named(self, kind: str) -> Json:
        asked = self._call.tokens_only
        assert asked is not None, "only a call of token ids is answered in them"
        self.id = asked.request_id or f"gen-{uuid.uuid4().hex}"
        return {"request_id": self.id, "created": self.created, "model": self.model}

    def _choice_text(self, choice: int, prompt: TokenizedPrompt, delta: Delta) -> bytes:
        return b""

    def _event_text(self, text: str, *, first: bool) -> bytes:
        return b""

    def _logprobs(
        self, choice: int, prompt: TokenizedPrompt, delta: Delta, positions: Any, *, first: bool
    ) -> bytes:
        asked, scores = self._call.tokens_only, delta.logprobs or []
        if asked is not None and asked.columns:
            return _encode(columns_of(delta.token_ids, scores, self._call.logprobs or 0))
        return chat_logprobs(delta.token_ids, scores, self._spell, self._call.logprobs or 0)

    def _about_prompt(self, prompt: TokenizedPrompt, positions: Any) -> bytes:
        if self._call.prompt_logprobs is not None and positions is not None:
            self._of_prompt = _encode(prompt_logprobs(positions, self._spell))
        return b"}"

    def body(self, choices: list[bytes], usage: Json) -> list[bytes]:
        """Returns the body in pieces. choices: JSON of each choice, in order."""
        pieces = super().body(choices, usage)
        pieces[-1] = (
            pieces[-1][:-1]
            + b',"prompt_logprobs":'
            + self._of_prompt
            + b',"kv_transfer_params":null}'
        )
        return pieces


def columns_of(ids: list[int], scores: Any, top: int) -> Json:
    """Returns the logprobs of the tokens `ids` as one list per field: each token's own logprob and
    rank, and the `top` likeliest ids with their logprobs. An id of -1 means none."""
    if isinstance(scores, LazyLogprobs):
        _, chosen, rank, likely, values = scores.columns
        return {
            "logprobs": np.fmax(chosen, LOWEST).tolist(),
            "ranks": rank.tolist(),
            "top_token_ids": likely[:, :top].tolist(),
            "top_logprobs": np.fmax(values[:, :top], LOWEST).tolist(),
        }
    own = [position[token] for token, position in zip(ids, scores, strict=True)]
    best = [
        sorted((each.rank, token, each.logprob) for token, each in found.items())
        for found in scores
    ]
    return {
        "logprobs": [each.logprob for each in own],
        "ranks": [each.rank for each in own],
        "top_token_ids": [[token for rank, token, _ in found if rank <= top] for found in best],
        "top_logprobs": [[value for rank, _, value in found if rank <= top] for found in best],
    }
