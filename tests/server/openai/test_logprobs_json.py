"""Logprobs written from columns are those of a plain construction, byte for byte, and a body is the sum of its choices.

The plain construction is here: dicts and lists, token by token, as the first server built them.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from server_fake import Facts, make_tokenizer, running_server

from penstock.engine.async_client import AsyncClient
from penstock.engine.channel import StepOutputs
from penstock.engine.client import Client, PendingRequest
from penstock.engine.logprobs import LazyLogprobs
from penstock.request import Delta, SamplingParams
from penstock.schedule.deltas import GOES_ON, LENGTH, STOP, Deltas, PromptNews
from penstock.server.online import handlers
from penstock.server.online.active_call import ActiveCall
from penstock.server.online.app_state import AppState
from penstock.server.online.buffered import Yielder
from penstock.server.online.metrics import Metrics
from penstock.server.openai.answers import ChatAnswer, CompletionAnswer
from penstock.server.openai.http_limits import HttpLimits
from penstock.server.openai.logprobs_json import Spelling, chat_logprobs, completion_logprobs, completion_object
from penstock.server.openai.prompt_ids import TokenizedPrompt
from penstock.server.openai.translate import Call
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

FLOOR = -9999.0
ODD = [math.nan, -math.inf, FLOOR, -10000.0, 0.0, -0.0, -1e-30, -0.1, -3.4e38]


def floor(value: float) -> float:
    return FLOOR if not value > FLOOR else value


def name(tokenizer: Tokenizer | None, token: int) -> str:
    return f"token_id:{token}" if tokenizer is None else tokenizer.token_text(token)


def slow_completion(ids: list[int], positions: list[Any], tokenizer: Tokenizer | None, offset: int) -> dict[str, Any]:
    out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
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


def slow_chat(ids: list[int], positions: list[Any], tokenizer: Tokenizer | None, top: int) -> dict[str, Any]:
    def entry(token: int, value: float) -> dict[str, Any]:
        data = name(None, token).encode() if tokenizer is None else tokenizer.token_bytes[token]
        return {"token": name(tokenizer, token), "logprob": floor(value), "bytes": list(data)}

    content = []
    for token, position in zip(ids, positions, strict=True):
        best = sorted(position.items(), key=lambda item: -floor(item[1].logprob))[:top]
        tops = [entry(other, value.logprob) for other, value in best]
        content.append(entry(token, position[token].logprob) | {"top_logprobs": tops})
    return {"content": content, "refusal": None}


def columns(count: int, k: int, seed: int, tokenizer: Tokenizer | None) -> tuple[list[int], LazyLogprobs]:
    """Random tokens: a third of the chosen ones are among their likely ones, some of those are missing at the end,
    numbers are equal at times, and odd ones are among them."""
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
def test_columns_are_written_as_the_plain_construction(count: int, k: int, texts: bool, tokenizer: Tokenizer) -> None:
    spell = Spelling(tokenizer, 256, as_ids=not texts)
    named = tokenizer if texts else None
    for seed in range(8):
        ids, lazy = columns(count, k, seed, tokenizer)
        part = completion_logprobs(ids, lazy, spell, 17)
        want = slow_completion(ids, list(lazy), named, 17)
        assert completion_object([part]) == msgspec.json.encode(want)
        assert part.end == 17 + sum(map(len, want["tokens"]))
        want = slow_chat(ids, list(lazy), named, k)
        assert chat_logprobs(ids, lazy, spell, k) == msgspec.json.encode(want)


def test_parts_follow_one_another(tokenizer: Tokenizer) -> None:
    """As with echo, where the prompt's positions are dicts, the first of them none."""
    spell = Spelling(tokenizer, 256)
    ids, lazy = columns(60, 3, 1, tokenizer)
    for cut in (0, 1, 2, 30, 60):
        listed = [None, *list(lazy)[1:cut]] if cut else []
        first = completion_logprobs(ids[:cut], listed, spell, 0)
        second = completion_logprobs(ids[cut:], lazy[cut:], spell, first.end)
        want = slow_completion(ids, [*listed, *list(lazy)[cut:]], tokenizer, 0)
        assert completion_object([first, second]) == msgspec.json.encode(want)


def test_tokens_without_their_logprobs_are_an_error(tokenizer: Tokenizer) -> None:
    spell = Spelling(tokenizer, 256)
    for count in (2, 20):
        ids, lazy = columns(count, 0, 0, tokenizer)
        for write in (completion_logprobs, chat_logprobs):
            with pytest.raises(ValueError):
                write(ids[1:], lazy, spell, 0)


# --- whole bodies, and streams, of a made-up engine's news


class End:
    """The channel's end of the real client: a test puts an engine's news into it."""

    def __init__(self) -> None:
        self.words: asyncio.Queue[StepOutputs] = asyncio.Queue()

    def take(self, deltas: Deltas) -> None:
        self.words.put_nowait(StepOutputs(deltas, [], None))

    async def receive(self) -> StepOutputs:
        return await self.words.get()

    def send_down(self, word: Any) -> None:
        pass


class Process:
    """An engine's, that doesn't end."""

    returncode = None

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0


def made_service(tokenizer: Tokenizer) -> tuple[AppState, End]:
    end = End()
    client = AsyncClient(Facts(), tokenizer, end, Process())  # type: ignore[arg-type]
    return AppState(client=client, model="fake", metrics=Metrics(client, "fake")), end


def news_of(n: int, prompts: list[list[int]], k: int, *, stream: bool, seed: int) -> list[Deltas]:
    """The news of samples that end at different times; many of their tokens are "a" to "e", so that stops are met."""
    draw = np.random.default_rng(seed)
    ends = {(p, s): int(draw.integers(1, 40)) for p, s in itertools.product(range(len(prompts)), range(n))}
    out = []
    for step in range(1, 41):
        at = [(p, s) for (p, s), end in ends.items() if (step <= end if stream else step == end)]
        sizes = [1 if stream else step] * len(at)
        total = sum(sizes)
        tokens = np.where(draw.random(total) < 0.7, draw.integers(64, 69, total), draw.integers(0, 256, total))
        top = -np.sort(draw.gamma(2.0, 2.0, (total, k)), axis=1)
        likely = np.array([draw.permutation(256)[:k] for _ in range(total)], np.int32).reshape(total, k)
        finish = [GOES_ON if step < ends[key] else (STOP if ends[key] % 3 == 0 else LENGTH) for key in at]
        news = Deltas(
            np.array([p for p, _ in at], np.int64), np.array([s for _, s in at], np.int32),
            np.array(finish, np.int8), np.full(len(at), -1, np.int32), np.cumsum([0, *sizes]).astype(np.int32),
            tokens.astype(np.int32), -draw.gamma(2.0, 4.0, total).astype(np.float32), np.ones(total, np.int32),
            likely, top.astype(np.float32),
        )  # fmt: skip
        if step == 1:
            news.prompts = [prompt_news(p, ids, k) for p, ids in enumerate(prompts)]
        out.append(news)
    return out


def prompt_news(request: int, ids: list[int], k: int) -> PromptNews:
    count = len(ids) - 1
    likely = np.tile(np.arange(k, dtype=np.int32), (count, 1))
    values = np.tile(-np.arange(k, dtype=np.float32), (count, 1))
    return PromptNews(request, 0, np.full(count, -1.5, np.float32), np.ones(count, np.int32), likely, values)


def slow_choice(choice: int, call: Call, delta: Delta, positions: Any, tokenizer: Tokenizer, chat: bool) -> Any:
    prompt = call.prompts[choice // call.sampling.n].ids
    logprobs = None
    if call.logprobs is not None and chat:
        logprobs = slow_chat(delta.token_ids, list(delta.logprobs or []), tokenizer, call.logprobs)
    elif call.logprobs is not None:
        ids, listed = [*delta.token_ids], [*(delta.logprobs or [])]
        if call.echo:
            ids, listed = prompt + ids, positions + listed
        logprobs = slow_completion(ids, listed, tokenizer, 0)
    text = (tokenizer.decode(prompt) if call.echo else "") + delta.text
    shown = {"message": {"role": "assistant", "content": text, "refusal": None}} if chat else {"text": text}
    ends = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
    out = {"index": choice, **shown, "logprobs": logprobs, **ends}
    if call.return_token_ids:
        out |= {"token_ids": delta.token_ids, "prompt_token_ids": prompt}
    return out


def make_call(sampling: SamplingParams, prompts: list[list[int]], **more: Any) -> Call:
    return Call(
        prompts=[TokenizedPrompt(ids) for ids in prompts],
        sampling=sampling,
        include_usage=False,
        logprobs=sampling.logprobs,
        **{"stream": False, **more},
    )


async def run_call(tokenizer: Tokenizer, call: Call, news: list[Deltas], chat: bool) -> list[bytes]:
    """The body's pieces, or the events."""
    service, end = made_service(tokenizer)
    answer = (ChatAnswer if chat else CompletionAnswer)(call, "fake", service.spellings)
    running = ActiveCall(service, call)
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message["body"])

    work = handlers.EventStream(service, running, answer, None)._write(send) if call.stream else None
    task = asyncio.ensure_future(work or handlers.buffer_answer(service, running, answer))  # type: ignore[arg-type]
    for step in news:
        end.take(step)
        await asyncio.sleep(0)
    ended = await asyncio.wait_for(task, 30)
    return sent if call.stream else ended  # type: ignore[return-value]


ASKED: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "chosen": ({"logprobs": 0}, {}, False),
    "likely, stops": ({"logprobs": 4, "stop": ["ab", "ca", "é"]}, {}, False),
    "stops shown": ({"logprobs": 1, "stop": ["ab", "dd"], "include_stop_str_in_output": True}, {}, False),
    "echo": ({"logprobs": 2, "prompt_logprobs": 2}, {"echo": True, "return_token_ids": True}, False),
    "none": ({"stop": ["ab"]}, {"return_token_ids": True}, False),
    "chat": ({"logprobs": 0}, {}, True),
    "chat, likely": ({"logprobs": 3, "stop": ["cab"]}, {}, True),
    "chat, none": ({}, {}, True),
}  # fmt: skip
PROMPTS = [[72, 101, 200, 300 - 100], [65, 66, 67]]


@pytest.mark.parametrize("what", ASKED)
def test_a_body_is_that_of_the_plain_construction(what: str, tokenizer: Tokenizer) -> None:
    knobs, more, chat = ASKED[what]
    sampling = SamplingParams(n=5, max_tokens=40, **knobs)
    call = make_call(sampling, PROMPTS, **more)
    k = sampling.logprobs or 0
    pieces = asyncio.run(run_call(tokenizer, call, news_of(5, PROMPTS, k, stream=False, seed=3), chat))
    body = msgspec.json.decode(b"".join(pieces))

    other = Client(Facts(), tokenizer, lambda word: None)  # type: ignore[arg-type]
    asked: list[PendingRequest] = [other.submit(ids, sampling) for ids in PROMPTS]
    deltas = [d for news in news_of(5, PROMPTS, k, stream=False, seed=3) for d in other.process(news)]
    want = [
        slow_choice(d.request_id * 5 + d.index, call, d, asked[d.request_id].prompt_logprobs, tokenizer, chat)
        for d in sorted(deltas, key=lambda d: (d.request_id, d.index))
    ]
    assert len(want) == 10 and body["choices"] == want
    joined = b"".join(pieces)
    assert b'"choices":' + msgspec.json.encode(want) + b',"usage":' in joined
    assert body["usage"]["completion_tokens"] == sum(len(d.token_ids) for d in deltas)
    assert list(body) == ["id", "object", "created", "model", "choices", "usage"]
    if "stops" in what:
        assert any(isinstance(d.stop_reason, str) for d in deltas), "no stop string was met"


@pytest.mark.parametrize("what", ["chosen", "likely, stops", "echo", "chat", "chat, likely"])
def test_a_stream_says_the_same(what: str, tokenizer: Tokenizer) -> None:
    """Events of one token and of many, joined, are the lists of a plain construction of all tokens."""
    knobs, more, chat = ASKED[what]
    sampling = SamplingParams(n=3, max_tokens=40, **knobs)
    call = make_call(sampling, PROMPTS, stream=True, **more)
    k = sampling.logprobs or 0
    sent = asyncio.run(run_call(tokenizer, call, news_of(3, PROMPTS, k, stream=True, seed=5), chat))
    events = [msgspec.json.decode(line[6:]) for line in b"".join(sent).split(b"\n\n") if line]

    other = Client(Facts(), tokenizer, lambda word: None)  # type: ignore[arg-type]
    asked = [other.submit(ids, sampling, stream=True) for ids in PROMPTS]
    ended: dict[int, Delta] = {}
    for news in news_of(3, PROMPTS, k, stream=True, seed=5):
        for d in other.process(news):
            mine = ended.setdefault(d.request_id * 3 + d.index, Delta(d.request_id, d.index, logprobs=[]))
            mine.text += d.text
            mine.token_ids += d.token_ids
            mine.logprobs = [*(mine.logprobs or []), *(d.logprobs or [])]
            mine.finish_reason, mine.stop_reason = d.finish_reason, d.stop_reason
    for choice, delta in ended.items():
        want = slow_choice(choice, call, delta, asked[delta.request_id].prompt_logprobs, tokenizer, chat)
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice]
        for key in ("content",) if chat else ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [each for event in mine for each in event["logprobs"][key]] == want["logprobs"][key], key
        assert mine[-1]["finish_reason"] == want["finish_reason"] and mine[-1]["stop_reason"] == want["stop_reason"]


def test_the_loop_turns_while_a_large_step_is_written(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three answers are written at once out of one message, and others get their turns in between."""
    n, length, requests = 20, 50, 3
    total = n * length * requests
    news = Deltas(
        np.repeat(np.arange(requests), n), np.tile(np.arange(n, dtype=np.int32), requests),
        np.full(n * requests, LENGTH, np.int8), np.full(n * requests, -1, np.int32),
        np.arange(0, total + 1, length, dtype=np.int32), np.full(total, 65, np.int32),
        np.full(total, -1.0, np.float32), np.ones(total, np.int32), np.zeros((total, 0), np.int32),
        np.zeros((total, 0), np.float32),
    )  # fmt: skip

    async def main() -> tuple[int, int]:
        service, end = made_service(tokenizer)
        service.yielder = Yielder(100)
        call = make_call(SamplingParams(n=n, max_tokens=length, logprobs=0), [[65]])
        written: list[int] = []
        tasks = []
        for _ in range(requests):
            answer = CompletionAnswer(call, "fake", service.spellings)
            plain = answer.choice

            def counted(*given: Any, plain: Any = plain) -> bytes:
                written[-1] += length
                return plain(*given)  # type: ignore[no-any-return]

            monkeypatch.setattr(answer, "choice", counted)
            tasks.append(asyncio.ensure_future(handlers.buffer_answer(service, ActiveCall(service, call), answer)))
        end.take(news)
        while not all(task.done() for task in tasks):
            written.append(0)
            await asyncio.sleep(0)
        return sum(written), max(written)

    done, longest = asyncio.run(main())
    assert done == total
    assert longest <= 100 + requests * length


def test_a_large_body_goes_out_in_pieces(tmp_path: Path) -> None:
    with running_server(make_tokenizer(tmp_path), limits=HttpLimits(piece_bytes=10_000)) as server:
        asked = {"prompt": "x", "max_tokens": 200, "n": 26, "logprobs": 2}
        answer = httpx.post(server.url + "/v1/completions", json=asked)
        assert len(answer.content) > 200_000 and int(answer.headers["content-length"]) == len(answer.content)
        texts = [choice["text"] for choice in answer.json()["choices"]]
        assert len(set(texts)) == 26 and all(len(text) == 200 for text in texts)
        assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]
