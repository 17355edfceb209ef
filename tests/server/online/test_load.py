"""More than fits, over HTTP: the bound is taken exactly, the rest is refused early in OpenAI's shape, none is lost."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server_fake import Running, running_server

from penstock.errors import UsageError
from penstock.server.online.api_keys import gather_keys
from penstock.server.online.auth import AccessPolicy
from penstock.server.openai.http_limits import HttpLimits
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

COMPLETIONS = "/v1/completions"
BOUND = 100
BURST = 500


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    with running_server(tokenizer, limits=HttpLimits(max_num_queued_reqs=BOUND)) as running:
        yield running


def ask(body: dict[str, Any], *headers: str) -> bytes:
    data = json.dumps(body).encode()
    head = [f"POST {COMPLETIONS} HTTP/1.1", "host: localhost", "connection: close", f"content-length: {len(data)}"]
    return "\r\n".join([*head, *headers, "", ""]).encode() + data


async def answers_of(server: Running, requests: list[bytes], until: Any) -> list[tuple[int, dict[str, str], Any]]:
    """Sends all at once, each on its own connection; `until()` is awaited once all are sent."""
    host, port = server.url.removeprefix("http://").split(":")

    async def one(request: bytes) -> tuple[int, dict[str, str], Any]:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        writer.close()
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        return int(lines[0].split()[1]), headers, json.loads(body)

    tasks = [asyncio.create_task(one(request)) for request in requests]
    await until(tasks)
    return [await task for task in tasks]


def test_exactly_the_bound_is_taken_and_the_rest_is_told_when_to_come_again(server: Running) -> None:
    server.hold(True)

    async def until(tasks: list[asyncio.Task[Any]]) -> None:
        while sum(task.done() for task in tasks) < BURST - BOUND:
            await asyncio.sleep(0.01)
        health = await asyncio.to_thread(httpx.get, server.url + "/health/ready")
        metrics = await asyncio.to_thread(httpx.get, server.url + "/metrics")
        assert (health.status_code, metrics.status_code, len(server.engine.open)) == (200, 200, BOUND)
        server.loop.call_soon_threadsafe(server.engine.going.set)

    requests = [ask({"prompt": "x", "max_tokens": 2, "stream": False})] * BURST
    answers = asyncio.run(answers_of(server, requests, until))
    assert Counter(status for status, _, _ in answers) == {200: BOUND, 429: BURST - BOUND}
    for status, headers, body in answers:
        if status == 429:
            assert 1 <= int(headers["retry-after"]) <= 60
            assert set(body["error"]) == {"message", "type", "param", "code"}
            assert (body["error"]["type"], body["error"]["code"]) == ("rate_limit_error", "queue_full")
    queue = server.service.request_limits
    assert (queue.reqs.total, queue.tokens.total, queue.refused) == (0, 0, BURST - BOUND)
    assert httpx.post(server.url + COMPLETIONS, json={"prompt": "x"}).status_code == 200


def test_n_and_lists_of_prompts_count(server: Running) -> None:
    server.hold(True)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="fake", prompt=["a", "b", "c"], n=33, max_tokens=2, stream=True)
        assert server.service.request_limits.reqs.total == 99
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="fake", prompt="x", n=2)
        second = client.completions.create(model="fake", prompt="x", stream=True)
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x"}])
        second.close()
        server.wait_for(lambda: server.service.request_limits.reqs.total == 99)
        server.hold(False)
        assert sum(1 for event in stream if event.choices) == 198
    server.wait_for(lambda: server.service.request_limits.reqs.total == 0)


def test_tokens_are_refused_before_they_are_made(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plain = tokenizer.encode_batch

    def encode(texts: list[str], **more: Any) -> list[list[int]]:
        made.append(len(texts[0]))
        return plain(texts, **more)

    monkeypatch.setattr(tokenizer, "encode_batch", encode)
    with running_server(tokenizer, limits=HttpLimits(max_num_queued_tokens=200)) as server, httpx.Client() as http:
        server.hold(True)
        with http.stream("POST", server.url + COMPLETIONS, json={"prompt": "x" * 100, "stream": True}):
            assert server.service.request_limits.tokens.total == 100
            # 125 tokens by four characters a token: no room. 25: room, until they are counted.
            for size in (500, 101):
                answer = httpx.post(server.url + COMPLETIONS, json={"prompt": "x" * size})
                assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
            assert made[-2:] == [100, 101]
            answer = httpx.post(server.url + COMPLETIONS, json={"prompt": [1] * 101})
            assert answer.status_code == 429
            assert server.service.request_limits.tokens.total == 100
        server.wait_for(lambda: server.service.request_limits.tokens.total == 0)


def test_whatever_ends_a_request_gives_its_place_back(server: Running) -> None:
    bad: list[dict[str, Any]] = [
        {"prompt": ""}, {"prompt": "x", "n": 0}, {"prompt": "x" * 1000}, {"prompt": "x", "model": "y"},
        {"prompt": "x", "n": 70_000}, {"prompt": []}, {"prompt": [7.5]}, {"prompt": [[1], "x"]}, {"prompt": [999]},
        {"prompt": "x", "stop_token_ids": [999]}, {"prompt": "x", "stream": True, "prompt_logprobs": 1},
    ]  # fmt: skip
    for body in bad:
        answer = httpx.post(server.url + COMPLETIONS, json=body)
        assert answer.status_code in (400, 404), answer.text
    server.engine.fail_with = "numbers broke"
    assert httpx.post(server.url + COMPLETIONS, json={"prompt": "x"}).status_code == 500
    assert "numbers broke" in httpx.post(server.url + COMPLETIONS, json={"prompt": "x", "stream": True}).text
    server.wait_for(
        lambda: (server.service.request_limits.reqs.total, server.service.request_limits.tokens.total) == (0, 0)
    )


def test_bodies_on_their_way_in_are_bounded_too(tokenizer: Tokenizer) -> None:
    with running_server(tokenizer, limits=HttpLimits(max_reading_bytes=10_000, body_seconds=0.5)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        halves = [socket.create_connection((host, int(port)), timeout=30) for _ in range(2)]
        halves[0].sendall(ask({"prompt": "x" * 9_000})[:-100])
        server.wait_for(lambda: server.service.intake.bytes > 8_000)
        halves[1].sendall(ask({"prompt": "x" * 9_000})[:-100])
        assert halves[1].recv(100).startswith(b"HTTP/1.1 429 ")
        slow = b""
        while piece := halves[0].recv(1000):  # and it is closed
            slow += piece
        assert slow.startswith(b"HTTP/1.1 408 ") and b'"code":"body_too_slow"' in slow
        assert server.service.intake.bytes == 0
        for half in halves:
            half.close()


# -- a request's time


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
def test_a_timeout_aborts_and_says_so(server: Running, prompt: Any) -> None:
    server.hold(True)
    answer = httpx.post(server.url + COMPLETIONS, json={"prompt": prompt, "timeout": 0.2})
    assert (answer.status_code, answer.headers["x-should-retry"]) == (408, "false")
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("timeout", "timeout")
    assert server.engine.submitted and all(made.cancelled for made in server.engine.submitted)
    streamed = httpx.post(server.url + COMPLETIONS, json={"prompt": prompt, "timeout": 0.2, "stream": True})
    assert streamed.status_code == 200 and "[DONE]" not in streamed.text
    assert json.loads(streamed.text.removeprefix("data: "))["error"]["code"] == "timeout"
    assert not server.engine.open and server.service.request_limits.reqs.total == 0
    server.hold(False)
    assert httpx.post(server.url + COMPLETIONS, json={"prompt": prompt, "timeout": 600}).status_code == 200


def test_the_official_client_does_not_repeat_it(server: Running) -> None:
    server.hold(True)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=3) as client:
        with pytest.raises(openai.APIStatusError) as late:
            client.completions.create(model="fake", prompt="x", extra_body={"timeout": 0.1})
        assert late.value.status_code == 408 and len(server.engine.submitted) == 1


def test_the_servers_own_maximum_counts(tokenizer: Tokenizer) -> None:
    with running_server(tokenizer, limits=HttpLimits(request_seconds=0.2)) as server:
        server.hold(True)
        for body in ({"prompt": "x"}, {"prompt": "x", "timeout": 500.0}):
            assert httpx.post(server.url + COMPLETIONS, json=body, timeout=60).status_code == 408


def test_timeouts_and_limits_that_cannot_be(server: Running) -> None:
    for timeout in (0, -1, 1e9, "1", True, [1]):
        answer = httpx.post(server.url + COMPLETIONS, json={"prompt": "x", "timeout": timeout})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout"), timeout
    for bad in ({"max_num_queued_reqs": 0}, {"max_num_queued_tokens": -1}, {"request_seconds": 0.0}):
        with pytest.raises(UsageError):
            HttpLimits(**bad).check()  # type: ignore[arg-type]


# -- whose a request is


def test_keys_are_tenants_and_salts_go_down(tokenizer: Tokenizer) -> None:
    access = AccessPolicy(keys=gather_keys(["one", "two"], None, {}))
    with running_server(tokenizer, access=access) as server:
        for key in ("one", "two"):
            for salt in (None, "a", "a", "b"):
                body = {"prompt": "x", "max_tokens": 1, "cache_salt": salt}
                sent = httpx.post(server.url + COMPLETIONS, json=body, headers={"authorization": f"Bearer {key}"})
                assert sent.status_code == 200
        made = server.engine.submitted
        assert [stream.tenant for stream in made] == [1] * 4 + [2] * 4
        none, first, same, other = (stream.salt for stream in made[:4])
        assert none == 0 and first == same and len({none, first, other}) == 3
        assert [stream.salt for stream in made[4:]] == [none, first, same, other]
    with running_server(tokenizer) as server, httpx.Client(base_url=server.url) as http:
        messages = [{"role": "user", "content": "x"}]
        assert http.post("/v1/chat/completions", json={"messages": messages, "cache_salt": "\0é"}).status_code == 200
        assert server.engine.submitted[0].tenant == 0 and server.engine.submitted[0].salt > 0
        for salt in ("", "x" * 1025, 7, ["a"]):
            answer = http.post(COMPLETIONS, json={"prompt": "x", "cache_salt": salt})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")
