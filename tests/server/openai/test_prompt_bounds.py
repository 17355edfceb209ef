"""What one request may hold and make: prompts refused before they are looked at, long work off the
loop, whole answers within a bound, and no value in a refusal."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from batch_fake import batching, jsonl, line
from server_fake import CONTEXT, Running, make_tokenizer, running_server

from penstock.server.online.api_keys import gather_keys
from penstock.server.online.auth import AccessPolicy
from penstock.server.online.buffered import AnswerTooLargeError, BufferedResponse, ResponseBudget
from penstock.server.openai import prompt_ids
from penstock.server.openai.forms import read_chat, read_completion
from penstock.server.openai.http_limits import HttpLimits
from penstock.server.openai.translate import size_of
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LARGE = {"prompt": "x", "n": 64, "max_tokens": 200, "logprobs": 5}


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    with running_server(tokenizer, limits=HttpLimits(max_answer_bytes=100_000)) as running:
        yield running


@pytest.fixture
def tokenised(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that texts were tokenised in."""
    threads: list[int] = []
    plain = tokenizer.encode_batch

    def encode(texts: list[str], **more: Any) -> list[list[int]]:
        threads.append(threading.get_ident())
        return plain(texts, **more)

    monkeypatch.setattr(tokenizer, "encode_batch", encode)
    return threads


# -- prompts


def test_what_is_refused_by_its_number_or_length_is_not_looked_at(
    server: Running, tokenised: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(prompt_ids, "_id_prompt", lambda *given: looked.append(given))
    for fields, param in (
        ({"prompt": [[1]] * 8_193}, "prompt"),
        ({"prompt": [""] * 8_193}, "prompt"),
        ({"prompt": ["x"] * 8_192, "n": 9}, "n"),
        ({"prompt": [[1]] * 8_192, "n": 9}, "n"),
        ({"prompt": [1] * CONTEXT}, "prompt"),
        ({"prompt": [[1], [1] * CONTEXT]}, "prompt"),
    ):
        answer = httpx.post(server.url + COMPLETIONS, json=fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not looked and not tokenised and not server.engine.submitted


def test_what_no_prompt_makes_right_is_refused_before_one_is_tokenised(
    server: Running, tokenised: list[int]
) -> None:
    long = "x" * 5_000
    asked: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": long}),
        (CHAT, {"messages": [{"role": "user", "content": long}]}),
    ]
    for path, body in asked:
        for fields in (
            {"timeout": -1},
            {"timeout": 0},
            {"timeout": 1e12},
            {"prompt_logprobs": 1, "stream": True},
        ):
            answer = httpx.post(server.url + path, json={**body, **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (
                400,
                next(iter(fields)),
            ), (path, fields)
    assert not tokenised and server.service.request_limits.reqs.total == 0


def test_chats_long_texts_and_many_are_tokenised_off_the_loop(
    server: Running, tokenised: list[int]
) -> None:
    async def here() -> int:
        return threading.get_ident()

    loop = server.on_loop(here())
    message = {"role": "user", "content": ""}
    for path, body, beside in (
        (COMPLETIONS, {"prompt": "x"}, False),
        (COMPLETIONS, {"prompt": ["x"] * 100}, True),
        (COMPLETIONS, {"prompt": "x" * 5_000, "truncate_prompt_tokens": 9}, True),
        (CHAT, {"messages": [message]}, True),
        (CHAT, {"messages": [message] * 20}, True),
    ):
        tokenised.clear()
        httpx.post(server.url + path, json={**body, "max_tokens": 1})
        assert {thread != loop for thread in tokenised} == {beside}, body


def test_what_is_cut_off_is_not_looked_at(server: Running) -> None:
    body = {"prompt": [[1] * 1_000 + [2, 3], [4]], "truncate_prompt_tokens": 2, "max_tokens": 1}
    assert httpx.post(server.url + COMPLETIONS, json=body).status_code == 200
    assert [made.ids for made in server.engine.submitted] == [[2, 3], [4]]
    body["prompt"] = [[5_000_000] + [1] * CONTEXT]
    assert httpx.post(server.url + COMPLETIONS, json=body).status_code == 200
    body["prompt"] = [1] * CONTEXT + [5_000_000]
    assert httpx.post(server.url + COMPLETIONS, json=body).status_code == 400


def test_a_text_counts_in_the_queue_however_short() -> None:
    chat = json.dumps({"messages": [{"role": "user", "content": ""}] * 100}).encode()
    assert size_of(read_chat(chat)) == (1, 100)
    for prompt, size in (
        (["", ""], (2, 3)),
        ([[1, 2], [3]], (2, 4)),
        ([1, 2, 3], (1, 4)),
        ("abcde", (1, 2)),
    ):
        body = {"prompt": prompt}
        assert size_of(read_completion(json.dumps(body).encode())) == size
        body["logit_bias"] = {str(token): 1 for token in range(7)}
        assert size_of(read_completion(json.dumps(body).encode())) == (size[0], size[1] + 7)
        body["allowed_token_ids"] = [1, 2]
        assert size_of(read_completion(json.dumps(body).encode())) == (size[0], size[1] + 9)


# -- whole answers


def test_an_answer_beyond_the_bound_is_refused_and_may_be_streamed(server: Running) -> None:
    answer = httpx.post(server.url + COMPLETIONS, json=LARGE)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (
        400,
        "answer_too_large",
    ) and "stream it" in error["message"]
    server.wait_for(lambda: not server.engine.open)
    assert server.service.responses.bytes == 0 and server.service.request_limits.reqs.total == 0
    streamed = httpx.post(server.url + COMPLETIONS, json={**LARGE, "stream": True})
    assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n")
    assert httpx.post(server.url + COMPLETIONS, json={**LARGE, "n": 1}).status_code == 200
    server.wait_for(lambda: server.service.responses.bytes == 0)


def test_a_batchs_lines_are_its_keys(tokenizer: Tokenizer, tmp_path: Path) -> None:
    access = AccessPolicy(keys=gather_keys(["one", "two"], None, {}))
    with batching(tokenizer, tmp_path / "state", access=access) as server:
        for key in ("two", "one"):
            server.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            assert (
                server.until_over(server.submit(jsonl([line("a"), line("b")]))).status
                == "completed"
            )
        assert [made.tenant for made in server.engine.submitted] == [2, 2, 1, 1]
        assert [
            server.running.service.tenant_of(owner) for owner in (access.keys[1].name, "", "gone")
        ] == [2, 0, 0]


def test_the_largest_is_given_up() -> None:
    wholes = ResponseBudget(100)
    with wholes.hold([b""] * 3) as large, wholes.hold([b""] * 3) as small:
        large.put(0, b"x" * 60)
        small.put(0, b"x" * 30)
        small.put(1, b"x" * 20)  # which is what passes the bound
        small.check()
        assert wholes.bytes == 50 and large.given_up and not large.pieces
        for late in (large.check, lambda: large.put(1, b"x")):
            with pytest.raises(AnswerTooLargeError):
                late()
        with pytest.raises(AnswerTooLargeError):
            small.put(2, b"x" * 51)
        assert wholes.bytes == 0
    with wholes.hold([b""]) as alone:
        alone.put(0, b"x" * 100)
        assert wholes.bytes == 100
    assert wholes.bytes == 0


async def sent_by(whole: BufferedResponse, wholes: ResponseBudget, other: int) -> list[Any]:
    """What a reader got that has taken one piece of a body when another body of `other` bytes is
    made."""
    sent: list[Any] = []
    reading = asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 2:
            await reading.wait()

    async def receive() -> Any:
        raise AssertionError("nothing is asked of the client")

    sending = asyncio.create_task(whole({"type": "http"}, receive, send))
    while len(sent) < 2:
        await asyncio.sleep(0)
    with wholes.hold([b""]) as made:
        made.put(0, b"y" * other)
        reading.set()
        await sending
        assert wholes.bytes == other
    assert wholes.bytes == 0
    return sent


@pytest.mark.parametrize("other", [200_000, 500_000])
def test_a_body_counts_until_its_reader_has_it(other: int) -> None:
    wholes = ResponseBudget(1_000_000)
    pieces = [bytes([at]) * 100_000 for at in range(10)]
    start, *bodies = asyncio.run(
        sent_by(BufferedResponse(wholes, list(pieces), "id"), wholes, other)
    )
    assert (b"content-length", b"1000000") in start["headers"]
    got = b"".join(body["body"] for body in bodies)
    if other == 200_000:  # 300,000 are handed on: both have room
        assert got == b"".join(pieces) and [body["more_body"] for body in bodies] == [
            True,
            True,
            True,
            False,
        ]
    else:  # it is given up: what is missing is seen, since its length was said
        assert got == b"".join(pieces[:3]) and all(body["more_body"] for body in bodies)


# -- what a refusal says


def test_a_templates_words_are_told_and_a_messages_are_not(tmp_path: Path) -> None:
    template = (
        "{% if messages[0].content == 'a' %}{{ raise_exception('roles must alternate') }}{% endif"
        " %}{% if messages[0].content == 'b' %}{{ messages[0].missing.more }}{% endif %}{{"
        " raise_exception('I do not like ' ~ messages[0].content) }}"
    )
    with running_server(make_tokenizer(tmp_path, template=template)) as server:

        def said(content: str) -> str:
            answer = httpx.post(
                server.url + CHAT, json={"messages": [{"role": "user", "content": content}]}
            )
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"
            return str(answer.json()["error"]["message"])

        refuses = "the model's chat template refuses these messages"
        assert said("a") == f"{refuses}: roles must alternate"
        assert said("b") == f"{refuses} (UndefinedError)"
        assert said("zq7canary") == f"{refuses} (TemplateError)"
