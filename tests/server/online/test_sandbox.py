"""The server over the real sandbox: what a chat's template or a text takes, no other request
notices; and large bodies have their room."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from bare_http import CHAT, COMPLETIONS, connect, read_one, request
from server_fake import CONTEXT, Running, make_tokenizer, running_server

from penstock.sandbox.sandbox import SandboxPool
from penstock.sandbox.sandbox_process import Bounds
from penstock.server.online import handlers
from penstock.server.online import intake as limits_module
from penstock.server.online.api_keys import gather_keys
from penstock.server.online.auth import AccessPolicy
from penstock.server.openai import prompt_ids
from penstock.server.openai.http_errors import HttpError
from penstock.server.openai.http_limits import HttpLimits

pytestmark = pytest.mark.torch

BOMB = (
    "{% set l = ['y'] * 100000 %}{% if messages[0].content == 'boom' %}"
    "{{ l | select('in', ['x'] * 100000) | list | length }}{% endif %}<{{ messages[0].content }}>"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("model"), template=BOMB)
    pool = SandboxPool(tokenizer, CONTEXT, 2, Bounds(seconds=1))
    with running_server(tokenizer, sandboxes=pool) as running:
        yield running


def chat(server: Running, content: str, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}
    return httpx.post(server.url + CHAT, json=body, timeout=600)


def test_a_template_that_runs_away_holds_nobody_up(server: Running) -> None:
    assert chat(server, "hi").status_code == 200
    with ThreadPoolExecutor(2) as threads:
        bombs = [threads.submit(chat, server, "boom") for _ in range(2)]
        server.wait_for(lambda: len(server.service.sandboxes._open) == 2)
        pids = [each._process.pid for each in server.service.sandboxes._open]
        for pid in pids:  # as if a second of processor time each were very long
            os.kill(pid, signal.SIGSTOP)
        for path in ("/health", "/metrics", "/v1/models"):
            assert httpx.get(server.url + path, timeout=600).status_code == 200
        answer = httpx.post(
            server.url + COMPLETIONS, json={"prompt": "a", "max_tokens": 1}, timeout=600
        )
        assert answer.status_code == 200
        assert not any(bomb.done() for bomb in bombs)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        for bomb in bombs:
            error = bomb.result().json()["error"]
            assert (bomb.result().status_code, error["param"]) == (400, "messages")
            assert (
                error["message"]
                == "this takes too long to render and tokenise: send less text, or a simpler chat"
                " template"
            )
    assert chat(server, "hi").status_code == 200


def test_keys_take_turns_at_the_sandboxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(tmp_path, template=BOMB)
    pool, ended = SandboxPool(tokenizer, CONTEXT, 2, Bounds(seconds=1)), list[str]()
    plain = pool.run

    def noted(jobs: Any) -> Any:
        said, work = jobs[0].messages[0]["content"], plain(jobs)
        work.add_done_callback(lambda _: ended.append(said))
        return work

    monkeypatch.setattr(pool, "run", noted)
    access = AccessPolicy(keys=gather_keys(["of-many", "of-one"], None, {}))
    with (
        running_server(tokenizer, sandboxes=pool, access=access) as server,
        ThreadPoolExecutor(32) as threads,
    ):

        def ask(key: str, content: str) -> int:
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            asked = httpx.post(
                server.url + CHAT,
                json=body,
                headers={"authorization": f"Bearer {key}"},
                timeout=600,
            )
            return asked.status_code

        turns = server.service.turns.every
        places, _ = turns.capacity
        bombs = [threads.submit(ask, "of-many", "boom") for _ in range(places + 2)]
        server.wait_for(lambda: len(turns._waiting) == 2)
        assert ask("of-one", "hi") == 200
        assert {bomb.result() for bomb in bombs} == {400}
        assert ended.count("boom") == len(bombs) and ended.index("hi") <= places, (
            "those that waited before it have to wait behind it"
        )


def test_long_jobs_leave_a_sandbox_to_short_ones(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, template=BOMB)
    pool = SandboxPool(tokenizer, CONTEXT, 2, Bounds(seconds=1))
    with running_server(tokenizer, sandboxes=pool) as server, ThreadPoolExecutor(8) as threads:
        long, turns = server.service.turns.long, server.service.turns.every
        places, _ = long.capacity
        assert places == turns.capacity[0] - 1
        pad = {"unread": "x" * 70_000}
        bombs = [
            threads.submit(chat, server, "boom", chat_template_kwargs=pad)
            for _ in range(places + 1)
        ]
        server.wait_for(lambda: len(long._waiting) == 1)
        assert turns._taken == (places, 0) and not turns._waiting
        assert chat(server, "hi").status_code == 200
        assert {bomb.result().status_code for bomb in bombs} == {400}
        assert long._taken == turns._taken == (0, 0)


def test_the_loop_doesnt_read_a_long_body_or_put_many_messages_together(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: dict[str, set[int]] = {"read": set(), "together": set()}

    def noted(what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            said[what].add(threading.get_ident())
            return work(*given)

        return run

    monkeypatch.setattr(handlers, "read_chat", noted("read", handlers.read_chat))
    monkeypatch.setattr(prompt_ids, "plain_messages", noted("together", prompt_ids.plain_messages))
    assert chat(server, "hi").status_code == 200
    loops = said["read"] | said["together"]
    assert len(loops) == 1, "one thread does all of a short one"
    said |= {"read": set(), "together": set()}
    assert chat(server, "hi", chat_template_kwargs={"unread": "x" * 70_000}).status_code == 200
    assert not said["read"] & loops and said["together"] == loops
    said |= {"read": set(), "together": set()}
    many = [{"role": "user", "content": "hi"}] * 300
    body = {"messages": many, "max_tokens": 1, "truncate_prompt_tokens": 5}
    assert httpx.post(server.url + CHAT, json=body, timeout=600).status_code == 200
    assert said["read"] == loops and not said["together"] & loops


def test_a_chat_is_the_templates_text_and_a_long_one_is_refused(server: Running) -> None:
    answer = chat(server, "hello", return_token_ids=True)
    assert (
        bytes(server.engine.tokenizer.token_bytes[i][0] for i in server.engine.submitted[-1].ids)
        == b"<hello>"
    )  # type: ignore[union-attr]
    assert answer.status_code == 200
    for content in ("x" * CONTEXT, "x" * 1_000_000):
        error = chat(server, content).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert chat(server, "y" * 1_000_000, truncate_prompt_tokens=9).status_code == 200
    assert len(server.engine.submitted[-1].ids) == 9


def test_a_text_that_no_context_holds_is_refused_by_its_characters(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a text is tokenised")

    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    for name in ("encode_batch", "encode_prompt"):
        monkeypatch.setattr(tokenizer, name, never)
    monkeypatch.setattr(server.service.sandboxes, "run", never)
    for prompt in ("x" * 30_000_000, ["a", "x" * 3_000_000]):
        answer = httpx.post(server.url + COMPLETIONS, json={"prompt": prompt}, timeout=600)
        assert (answer.status_code, answer.json()["error"]["code"]) == (
            400,
            "context_length_exceeded",
        )
    assert server.service.intake.large.bytes == 0


def head(server: Running, size: int) -> socket.socket:
    """A connection on which a body of so many bytes is announced, and none of it sent."""
    connection = connect(server.url)
    connection.sendall(request(b"", f"content-length: {size}"))
    return connection


def test_large_bodies_past_their_room_are_refused_before_they_are_read(server: Running) -> None:
    intake, most = server.service.intake, server.service.limits.max_large_bytes
    first, second = head(server, most // 2), head(server, most // 2)
    server.wait_for(lambda: intake.large.bytes == most // 2 * 2)
    third = head(server, 2 * limits_module.LARGE)
    answer, body = read_one(third)
    assert (
        answer.startswith(b"HTTP/1.1 503 ")
        and b"retry-after: 1" in answer
        and b"server_busy" in body
    )
    assert (
        httpx.post(server.url + COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code
        == 200
    )
    for connection in (first, second, third):
        connection.close()
    server.wait_for(lambda: intake.large.bytes == intake.receiving.bytes == 0)


def test_a_large_body_without_a_length_takes_room_as_it_comes(server: Running) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(3 * limits_module.LARGE // 65_536):
            yield b"x" * 65_536
        server.wait_for(lambda: server.service.intake.large.bytes > limits_module.LARGE)
        yield b'"}'

    answer = httpx.post(server.url + COMPLETIONS, content=pieces(), timeout=600)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    server.wait_for(lambda: server.service.intake.large.bytes == 0)


def test_bodies_that_wait_to_be_read_are_bounded_and_go_with_their_clients(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    intake, going, read = server.service.intake, threading.Event(), list[int]()
    plain = handlers.read_completion

    def held(body: bytearray, limits: HttpLimits) -> Any:
        read.append(len(body))
        going.wait(600)
        return plain(body, limits)

    monkeypatch.setattr(handlers, "read_completion", held)
    monkeypatch.setattr(intake.parsing, "most", 300_000)
    body = json.dumps({"prompt": "a", "user": "x" * 100_000}).encode()
    connections = [connect(server.url) for _ in range(3)]
    try:
        for at, connection in enumerate(connections):
            server.wait_for(lambda waiting=at: intake.parsing.bytes == waiting * len(body))
            connection.sendall(request(body))
        answer, refusal = read_one(connections[2])
        assert answer.startswith(b"HTTP/1.1 503 ") and b"server_busy" in refusal
        connections[1].close()  # amid its wait
        server.wait_for(lambda: intake.parsing.bytes == len(body))
        going.set()
        answer, _ = read_one(connections[0])
        assert answer.startswith(b"HTTP/1.1 200 ") and len(read) == 1
        server.wait_for(lambda: intake.parsing.bytes == 0)
    finally:
        going.set()
        for connection in connections:
            connection.close()


def test_a_body_that_is_alone_may_be_larger_than_all_room(server: Running) -> None:
    intake = limits_module.Intake(
        HttpLimits(max_large_bytes=limits_module.LARGE), server.service.body_timeouts
    )
    with limits_module.BodyRoom(intake.large) as one:
        one.count(5 * limits_module.LARGE)
        with limits_module.BodyRoom(intake.large) as other, pytest.raises(HttpError):
            other.count(2 * limits_module.LARGE)
        one.count(6 * limits_module.LARGE)
        assert intake.large.bytes == 6 * limits_module.LARGE
    assert intake.large.bytes == 0
