"""More than fits, over HTTP: the rest is refused early in OpenAI's shape, no body is waited for,
the connection lives on, and nothing is lost. That exactly the bound is taken: test_request_limits,
and test_overload on a whole service."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from bare_http import CHAT, COMPLETIONS, connect, read_one, request
from server_fake import Running, running_server

from penstock.errors import UsageError
from penstock.server.online.api_keys import gather_keys
from penstock.server.online.auth import AccessPolicy
from penstock.server.openai.http_limits import HttpLimits
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

BOUND = 100
FULL = {"prompt": "x", "n": BOUND, "stream": True}


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    with running_server(tokenizer, limits=HttpLimits(max_num_queued_reqs=BOUND)) as running:
        yield running


def is_refused(answer: tuple[bytes, bytes]) -> bool:
    head, body = answer
    error = json.loads(body)["error"]
    shown = (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    return head.startswith(b"HTTP/1.1 429 ") and b"\r\nretry-after: " in head and shown


def test_a_kept_connection_is_served_when_there_is_room(server: Running) -> None:
    with connect(server.url) as kept:
        kept.sendall(request({"prompt": "x", "max_tokens": 2}))
        assert b" 200 " in read_one(kept)[0]
        server.hold(True)
        with httpx.Client() as http, http.stream("POST", server.url + COMPLETIONS, json=FULL):
            for path in (COMPLETIONS, CHAT):
                data = request({"prompt": "x" * 500}, path=path)
                kept.sendall(data[:-300])  # the answer comes before the body has
                answer = read_one(kept)
                assert is_refused(answer) and b"connection: close" not in answer[0]
                kept.sendall(data[-300:-100])
                time.sleep(0.02)
                kept.sendall(data[-100:])
        server.hold(False)
        server.wait_for(lambda: server.service.request_limits.reqs.total == 0)
        kept.sendall(request({"prompt": "x", "max_tokens": 2}))
        head, body = read_one(kept)
        assert b" 200 " in head and json.loads(body)["choices"][0]["text"] == "ab"


def test_keys_have_their_own_rooms(tokenizer: Tokenizer) -> None:
    access = AccessPolicy(keys=gather_keys(["busy", "calm"], None, {}))
    with running_server(
        tokenizer, access=access, limits=HttpLimits(max_num_queued_reqs=8)
    ) as server:
        server.hold(True)
        with httpx.Client(base_url=server.url) as http:
            bearer = {
                name: {"authorization": f"Bearer {name}"} for name in ("busy", "calm", "wrong")
            }
            with http.stream("POST", COMPLETIONS, json=FULL | {"n": 6}, headers=bearer["busy"]):
                for name, status in (("busy", 429), ("wrong", 401), ("calm", 400)):
                    assert (
                        http.post(
                            COMPLETIONS, json={"prompt": ""}, headers=bearer[name]
                        ).status_code
                        == status
                    )
            server.hold(False)


def test_n_and_lists_of_prompts_count(server: Running) -> None:
    server.hold(True)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model="fake", prompt=["a", "b", "c"], n=33, max_tokens=2, stream=True
        )
        assert server.service.request_limits.reqs.total == 99
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="fake", prompt="x", n=2)
        second = client.completions.create(model="fake", prompt="x", stream=True)
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "x"}]
            )
        second.close()
        server.wait_for(lambda: server.service.request_limits.reqs.total == 99)
        server.hold(False)
        assert sum(1 for event in stream if event.choices) == 198
    server.wait_for(lambda: server.service.request_limits.reqs.total == 0)


def test_tokens_are_refused_before_they_are_made(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    plain = tokenizer.encode_batch

    def encode(texts: list[str], **more: Any) -> list[list[int]]:
        made.append(len(texts[0]))
        return plain(texts, **more)

    monkeypatch.setattr(tokenizer, "encode_batch", encode)
    with (
        running_server(tokenizer, limits=HttpLimits(max_num_queued_tokens=200)) as server,
        httpx.Client() as http,
    ):
        server.hold(True)
        with http.stream(
            "POST", server.url + COMPLETIONS, json={"prompt": "x" * 100, "stream": True}
        ):
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
        {"prompt": ""},
        {"prompt": "x", "n": 0},
        {"prompt": "x" * 1000},
        {"prompt": "x", "model": "y"},
        {"prompt": "x", "n": 70_000},
        {"prompt": []},
        {"prompt": [7.5]},
        {"prompt": [[1], "x"]},
        {"prompt": [999]},
        {"prompt": "x", "stop_token_ids": [999]},
        {"prompt": "x", "stream": True, "prompt_logprobs": 1},
    ]
    for body in bad:
        answer = httpx.post(server.url + COMPLETIONS, json=body)
        assert answer.status_code in (400, 404), answer.text
    server.engine.fail_with = "numbers broke"
    assert httpx.post(server.url + COMPLETIONS, json={"prompt": "x"}).status_code == 500
    assert (
        "numbers broke"
        in httpx.post(server.url + COMPLETIONS, json={"prompt": "x", "stream": True}).text
    )
    server.wait_for(
        lambda: (
            (server.service.request_limits.reqs.total, server.service.request_limits.tokens.total)
            == (0, 0)
        )
    )


def test_bodies_on_their_way_in_are_bounded_too(tokenizer: Tokenizer) -> None:
    with running_server(
        tokenizer, limits=HttpLimits(max_reading_bytes=10_000, body_seconds=1000)
    ) as server:
        host, port = server.url.removeprefix("http://").split(":")
        halves = [socket.create_connection((host, int(port)), timeout=600) for _ in range(2)]
        halves[0].sendall(request({"prompt": "x" * 9_000})[:-100])
        server.wait_for(lambda: server.service.intake.receiving.bytes > 8_000)
        halves[1].sendall(request({"prompt": "x" * 9_000})[:-100])
        assert halves[1].recv(100).startswith(b"HTTP/1.1 429 ")
        server.pass_time(2000)
        slow = b""
        while piece := halves[0].recv(1000):  # and it is closed
            slow += piece
        assert slow.startswith(b"HTTP/1.1 408 ") and b'"code":"body_too_slow"' in slow
        assert server.service.intake.receiving.bytes == 0
        for half in halves:
            half.close()


def test_long_bodies_on_their_way_in_leave_room_to_short_ones(tokenizer: Tokenizer) -> None:
    with running_server(tokenizer, limits=HttpLimits(max_reading_bytes=400_000)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        halves = [socket.create_connection((host, int(port)), timeout=600) for _ in range(2)]
        halves[0].sendall(request({"prompt": "x" * 90_000})[:-100])
        server.wait_for(lambda: server.service.intake.receiving.bytes > 80_000)
        halves[1].sendall(request({"prompt": "x" * 90_000})[:-100])
        assert halves[1].recv(100).startswith(b"HTTP/1.1 429 ")
        assert (
            httpx.post(
                server.url + COMPLETIONS, json={"prompt": "x" * 60, "user": "x" * 30_000}
            ).status_code
            == 200
        )
        for half in halves:
            half.close()


# -- a request's time


def overdue(server: Running, ask: Callable[[], Any], count: int = 1) -> Any:
    """What comes of a request whose time of 1000 s is over while the engine has it."""
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ask)
        server.wait_for(lambda: len(server.engine.open) == count)
        server.pass_time(2000)
        return answer.result()


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
def test_a_timeout_aborts_and_says_so(server: Running, prompt: Any) -> None:
    url, body = server.url + COMPLETIONS, {"prompt": prompt, "timeout": 1000}
    server.hold(True)
    answer = overdue(server, lambda: httpx.post(url, json=body), len(prompt))
    assert (answer.status_code, answer.headers["x-should-retry"]) == (408, "false")
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (
        "timeout",
        "timeout",
    )
    assert all(made.cancelled for made in server.engine.submitted)
    ask = partial(httpx.post, url, json={**body, "stream": True})
    streamed = overdue(server, ask, len(prompt))
    assert streamed.status_code == 200 and "[DONE]" not in streamed.text
    assert json.loads(streamed.text.removeprefix("data: "))["error"]["code"] == "timeout"
    assert not server.engine.open and server.service.request_limits.reqs.total == 0
    server.hold(False)
    assert httpx.post(url, json=body).status_code == 200


def test_the_official_client_does_not_repeat_it(server: Running) -> None:
    server.hold(True)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=3) as client:
        ask = partial(client.completions.create, model="fake", prompt="x")
        with pytest.raises(openai.APIStatusError) as late:
            overdue(server, partial(ask, extra_body={"timeout": 1000}))
        assert late.value.status_code == 408 and len(server.engine.submitted) == 1


def test_the_servers_own_maximum_counts(tokenizer: Tokenizer) -> None:
    with running_server(tokenizer, limits=HttpLimits(request_seconds=1000)) as server:
        server.hold(True)
        for body in ({"prompt": "x"}, {"prompt": "x", "timeout": 5000.0}):
            ask = partial(httpx.post, server.url + COMPLETIONS, json=body)
            assert overdue(server, ask).status_code == 408


def test_timeouts_and_limits_that_cannot_be(server: Running) -> None:
    for timeout in (0, -1, 1e9, "1", True, [1]):
        answer = httpx.post(server.url + COMPLETIONS, json={"prompt": "x", "timeout": timeout})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout"), timeout
    for bad in (
        {"max_num_queued_reqs": 0},
        {"max_num_queued_tokens": -1},
        {"request_seconds": 0.0},
    ):
        with pytest.raises(UsageError):
            HttpLimits(**bad).check()  # type: ignore[arg-type]


# -- whose a request is


def test_keys_are_tenants_and_salts_go_down(tokenizer: Tokenizer) -> None:
    access = AccessPolicy(keys=gather_keys(["one", "two"], None, {}))
    with running_server(tokenizer, access=access) as server:
        for key in ("one", "two"):
            for salt in (None, "a", "a", "b"):
                body = {"prompt": "x", "max_tokens": 1, "cache_salt": salt}
                sent = httpx.post(
                    server.url + COMPLETIONS, json=body, headers={"authorization": f"Bearer {key}"}
                )
                assert sent.status_code == 200
        made = server.engine.submitted
        assert [stream.tenant for stream in made] == [1] * 4 + [2] * 4
        none, first, same, other = (stream.salt for stream in made[:4])
        assert none == 0 and first == same and len({none, first, other}) == 3
        assert [stream.salt for stream in made[4:]] == [none, first, same, other]
    with running_server(tokenizer) as server, httpx.Client(base_url=server.url) as http:
        messages = [{"role": "user", "content": "x"}]
        assert (
            http.post(
                "/v1/chat/completions", json={"messages": messages, "cache_salt": "\0é"}
            ).status_code
            == 200
        )
        assert server.engine.submitted[0].tenant == 0 and server.engine.submitted[0].salt > 0
        for salt in ("", "x" * 1025, 7, ["a"]):
            answer = http.post(COMPLETIONS, json={"prompt": "x", "cache_salt": salt})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")
