"""Log-probabilities as the three APIs write them: OpenAI's completions, OpenAI's chat, vLLM's prompt_logprobs.

It knows deltas' positions and how a token is spelt; no engine, no HTTP. JSON has no -inf, so the floor is -9999, as in
vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.request import Logprob, PositionLogprobs

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

LOWEST = -9999.0
Positions = Sequence[PositionLogprobs | None]


class Speller:
    """What a token is called in an answer: its text, or `token_id:N` where that was asked for or there is no text."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def text(self, token: int) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.token_text(token)

    def bytes(self, token: int) -> list[int]:
        """The token's own bytes: of a torn character the part that it has, not the text's U+FFFD."""
        if self._as_ids or self._tokenizer is None:
            return list(self.text(token).encode())
        return list(self._tokenizer.token_bytes[token])


def _floor(value: float) -> float:
    return value if value > LOWEST else LOWEST  # also what NaN becomes


def completion_logprobs(ids: Sequence[int], positions: Positions, spell: Speller, offset: int) -> dict[str, Any]:
    """OpenAI's completions object for these tokens; `offset` is where their text begins. None is "no value", as for a
    prompt's first token."""
    tokens: list[str] = []
    chosen: list[float | None] = []
    top: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token, position in zip(ids, positions, strict=True):
        word = spell.text(token)
        tokens.append(word)
        offsets.append(offset)
        offset += len(word)
        if position is None or token not in position:
            chosen.append(None)
            top.append(None)
            continue
        chosen.append(_floor(position[token].logprob))
        row = {word: _floor(position[token].logprob)}
        for other, value in position.items():  # ids of one spelling: the chosen one, else the likeliest
            row.setdefault(spell.text(other), _floor(value.logprob))
        top.append(row)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}


def chat_logprobs(ids: Sequence[int], positions: Positions, spell: Speller, top: int) -> dict[str, Any]:
    """OpenAI's chat object for these tokens, with the `top` likeliest of each."""
    content = []
    for token, position in zip(ids, positions, strict=True):
        known = position or {}
        entry = _chat_entry(token, known[token].logprob if token in known else LOWEST, spell)
        likeliest = sorted(known.items(), key=lambda item: -_floor(item[1].logprob))[:top]
        entry["top_logprobs"] = [_chat_entry(other, value.logprob, spell) for other, value in likeliest]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(token: int, logprob: float, spell: Speller) -> dict[str, Any]:
    return {"token": spell.text(token), "logprob": _floor(logprob), "bytes": spell.bytes(token)}


def prompt_logprobs(positions: Positions, spell: Speller) -> list[dict[str, Any] | None]:
    """vLLM's: a position is null or {token id: {logprob, rank, decoded_token}}."""
    return [None if position is None else _vllm_position(position, spell) for position in positions]


def _vllm_position(position: PositionLogprobs, spell: Speller) -> dict[str, Any]:
    return {str(token): _vllm_entry(token, value, spell) for token, value in position.items()}


def _vllm_entry(token: int, value: Logprob, spell: Speller) -> dict[str, Any]:
    return {"logprob": _floor(value.logprob), "rank": value.rank, "decoded_token": spell.text(token)}
