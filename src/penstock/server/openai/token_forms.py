"""Parses bodies of vLLM's /tokenize and /detokenize. The first has the prompt of a completion or a
chat, the second token ids. Knows JSON and the structs of completions and chats; no tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.mask_board import Int32
from penstock.server.openai.forms import (
    ChatForm,
    CompletionForm,
    chat_form,
    completion_form,
    read_object,
)
from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.http_limits import USUAL, HttpLimits

MOST_IDS = 1_000_000  # most ids in a body of /detokenize; counted before the body is parsed


@dataclass(frozen=True, slots=True)
class TokenizeForm:
    """The body of /tokenize. form: its prompt as the body of a completion or a chat. spelt: return
    the tokens' spellings too (`return_token_strs`)."""

    form: CompletionForm | ChatForm
    spelt: bool


def read_tokenize(body: bytes | bytearray, limits: HttpLimits = USUAL) -> TokenizeForm:
    """Parses the body of POST /tokenize. It has `prompt`, one text, or `messages` as in a chat.
    Raises HttpError."""
    raw = read_object(body, limits)
    spelt = _flag(raw, "return_token_strs")
    if "messages" in raw:
        if "prompt" in raw:
            raise HttpError(
                "prompt and messages exclude each other: give one of them", param="prompt"
            )
        return TokenizeForm(chat_form(raw, limits), spelt)
    if not isinstance(raw.get("prompt"), str):
        raise HttpError("prompt must be one text, or give messages", param="prompt")
    return TokenizeForm(completion_form(raw, limits), spelt)


def read_detokenize(
    body: bytes | bytearray, vocabulary: int, limits: HttpLimits = USUAL
) -> tuple[str | None, Int32]:
    """Parses the body of POST /detokenize. Returns (requested model or None, ids). vocabulary:
    number of ids. Raises HttpError."""
    raw = read_object(body, replace(limits, max_values=MOST_IDS + 2))
    model, tokens = raw.pop("model", None), raw.pop("tokens", None)
    if raw:
        name = sorted(raw)[0]
        raise HttpError(
            f"{name!r} is not a field of /detokenize: it takes model and tokens", param=name
        )
    if model is not None and not isinstance(model, str):
        raise HttpError("model must be a text", param="model")
    if isinstance(tokens, list) and len(tokens) > MOST_IDS:
        raise HttpError(f"tokens has more than {MOST_IDS} ids: send them in parts", param="tokens")
    if not isinstance(tokens, list) or set(map(type, tokens)) - {int}:
        raise HttpError("tokens must be a list of token ids", param="tokens")
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocabulary):
        message = f"tokens has an id outside the vocabulary: ids go from 0 to {vocabulary - 1}"
        raise HttpError(message, param="tokens")
    return model, np.array(tokens, np.int32)


def _flag(raw: dict[str, Any], name: str) -> bool:
    value = raw.pop(name, None)
    if value not in (None, True, False):
        raise HttpError(f"{name} must be true or false", param=name)
    return bool(value)
