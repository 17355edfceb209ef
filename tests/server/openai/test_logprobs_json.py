"""Logprobs written from columns are those of a plain construction, byte for byte.

The plain construction is here: dicts and lists, token by token, as the first server built them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from server_fake import make_tokenizer, running_server

from penstock.engine.logprobs import LazyLogprobs
from penstock.server.openai.answer_objects import ChatLogprobs, CompletionLogprobs
from penstock.server.openai.http_limits import HttpLimits
from penstock.server.openai.logprobs_json import (
    Spelling,
    chat_logprobs,
    completion_logprobs,
    completion_object,
)
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

FLOOR = -9999.0
ODD = [math.nan, -math.inf, FLOOR, -10000.0, 0.0, -0.0, -1e-30, -0.1, -3.4e38]


def floor(value: float) -> float:
    return FLOOR if not value > FLOOR else value


def name(tokenizer: Tokenizer | None, token: int) -> str:
    return f"token_id:{token}" if tokenizer is None else tokenizer.token_text(token)


def slow_completion(
    ids: list[int], positions: list[Any], tokenizer: Tokenizer | None, offset: int
) -> dict[str, Any]:
    out: dict[str, Any] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token, position in zip(ids, positions, strict=True):
        word = name(tokenizer, token)
        out["tokens"].append(word)
        out["text_offset"].append(offset)
        offset += len(word)
        if position is None:
            out["token_logprobs"].append(None)
            out["top_logprobs"].append(None)
            continue
        row = {word: floor(position[token].logprob)}
        for other, value in position.items():
            row.setdefault(name(tokenizer, other), floor(value.logprob))
        out["token_logprobs"].append(row[word])
        out["top_logprobs"].append(row)
    return out


def slow_chat(
    ids: list[int], positions: list[Any], tokenizer: Tokenizer | None, top: int
) -> dict[str, Any]:
    def entry(token: int, value: float) -> dict[str, Any]:
        data = name(None, token).encode() if tokenizer is None else tokenizer.token_bytes[token]
        return {"token": name(tokenizer, token), "logprob": floor(value), "bytes": list(data)}

    content = []
    for token, position in zip(ids, positions, strict=True):
        best = sorted(position.items(), key=lambda item: -floor(item[1].logprob))[:top]
        tops = [entry(other, value.logprob) for other, value in best]
        content.append(entry(token, position[token].logprob) | {"top_logprobs": tops})
    return {"content": content, "refusal": None}


def as_struct(value: dict[str, Any], kind: type[msgspec.Struct]) -> bytes:
    return msgspec.json.encode(msgspec.convert(value, kind))


def columns(
    count: int, k: int, seed: int, tokenizer: Tokenizer | None
) -> tuple[list[int], LazyLogprobs]:
    """Random tokens: a third of the chosen ones are among their likely ones, some of those are
    missing at the end, numbers are equal at times, and odd ones are among them."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, 256, count, np.int32)
    likely = np.array([draw.permutation(256)[:k] for _ in range(count)], np.int32).reshape(count, k)
    top = -np.sort(np.round(draw.gamma(2.0, 2.0, (count, k)), 1), axis=1).astype(np.float32)
    chosen = -np.round(draw.gamma(2.0, 4.0, count), 2).astype(np.float32)
    for row in range(count if k else 0):
        if draw.random() < 0.3 and tokens[row] not in likely[row]:
            likely[row, draw.integers(k)] = tokens[row]
        if draw.random() < 0.3:
            chosen[row] = top[row, -1]
        if draw.random() < 0.2:
            likely[row, draw.integers(k) :] = -1
        if draw.random() < 0.2:
            top[row, draw.integers(k) :] = -np.inf
    odd = draw.random(count) < 0.2
    chosen[odd] = np.resize(np.array(ODD, np.float32), int(odd.sum()))
    rank = np.ones(count, np.int32)
    spell = None if tokenizer is None else tokenizer.token_text
    return tokens.tolist(), LazyLogprobs((tokens, chosen, rank, likely, top), spell)


@pytest.mark.parametrize("texts", [True, False])
@pytest.mark.parametrize("k", [0, 1, 2, 5, 20])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 100])
def test_columns_are_written_as_the_plain_construction(
    count: int, k: int, texts: bool, tokenizer: Tokenizer
) -> None:
    spell = Spelling(tokenizer, 256, as_ids=not texts)
    named = tokenizer if texts else None
    for seed in range(8):
        ids, lazy = columns(count, k, seed, tokenizer)
        part = completion_logprobs(ids, lazy, spell, 17)
        want = slow_completion(ids, list(lazy), named, 17)
        assert completion_object([part]) == as_struct(want, CompletionLogprobs)
        assert part.end == 17 + sum(map(len, want["tokens"]))
        want = slow_chat(ids, list(lazy), named, k)
        assert chat_logprobs(ids, lazy, spell, k) == as_struct(want, ChatLogprobs)


def test_parts_follow_one_another(tokenizer: Tokenizer) -> None:
    """As with echo, where the prompt's positions are dicts, the first of them none."""
    spell = Spelling(tokenizer, 256)
    ids, lazy = columns(60, 3, 1, tokenizer)
    for cut in (0, 1, 2, 30, 60):
        listed = [None, *list(lazy)[1:cut]] if cut else []
        first = completion_logprobs(ids[:cut], listed, spell, 0)
        second = completion_logprobs(ids[cut:], lazy[cut:], spell, first.end)
        want = slow_completion(ids, [*listed, *list(lazy)[cut:]], tokenizer, 0)
        assert completion_object([first, second]) == as_struct(want, CompletionLogprobs)


def test_tokens_without_their_logprobs_are_an_error(tokenizer: Tokenizer) -> None:
    spell = Spelling(tokenizer, 256)
    for count in (2, 20):
        ids, lazy = columns(count, 0, 0, tokenizer)
        for write in (completion_logprobs, chat_logprobs):
            with pytest.raises(ValueError):
                write(ids[1:], lazy, spell, 0)


def test_a_large_body_goes_out_in_pieces(tmp_path: Path) -> None:
    with running_server(make_tokenizer(tmp_path), limits=HttpLimits(piece_bytes=10_000)) as server:
        asked = {"prompt": "x", "max_tokens": 200, "n": 26, "logprobs": 2}
        answer = httpx.post(server.url + "/v1/completions", json=asked)
        assert len(answer.content) > 200_000 and int(answer.headers["content-length"]) == len(
            answer.content
        )
        texts = [choice["text"] for choice in answer.json()["choices"]]
        assert len(set(texts)) == 26 and all(len(text) == 200 for text in texts)
        assert (
            answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]
        )
