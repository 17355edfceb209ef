"""POST /v1/bulk: lines in, results as they finish; what is broken, what goes away, and that nothing
is left behind."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_fake import Running, running_server

from penstock.server.batch import bulk
from penstock.server.online.buffered import BufferedBody, ResponseBudget
from penstock.server.openai.http_limits import HttpLimits
from penstock.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    with running_server(tokenizer) as running:
        yield running


def body_of(*rows: Any) -> bytes:
    return b"".join(
        (row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows
    )


def results(server: Running, *rows: Any, **more: Any) -> dict[int | None, dict[str, Any]]:
    """The answer's lines by their lines' numbers."""
    answer = httpx.post(f"{server.url}/v1/bulk", content=body_of(*rows), timeout=600, **more)
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-ndjson", (
        answer.text
    )
    told = [json.loads(line) for line in answer.text.splitlines()]
    found = {line.get("line"): line for line in told}
    assert len(found) == len(told)
    return found


def idle(server: Running) -> bool:
    limits = server.service.request_limits
    return not server.engine.open and limits.reqs.total == limits.tokens.total == 0


def test_a_thousand_rows_say_what_requests_of_their_own_say(server: Running) -> None:
    rows = [
        {
            "custom_id": f"r{i}",
            "prompt": [97 + i % 20, 98],
            "max_tokens": 3 + i % 3,
            "n": 1 + i % 2,
            "seed": i % 4,
        }
        for i in range(1000)
    ]
    found = results(server, *rows)
    assert sorted(found) == list(range(1, 1001)) and idle(server)
    for at in (0, 1, 7, 999):
        alone = httpx.post(
            f"{server.url}/v1/completions",
            json={k: v for k, v in rows[at].items() if k != "custom_id"},
        )
        mine = found[at + 1]
        assert mine["custom_id"] == f"r{at}" and mine["choices"] == alone.json()["choices"]
        assert mine["usage"] == alone.json()["usage"] and mine["object"] == "text_completion"


def test_text_and_echo_and_no_name(server: Running) -> None:
    found = results(
        server, {"prompt": "hello", "max_tokens": 2, "echo": True}, b"", {"prompt": "x" * 90}
    )
    assert (
        found[1]["choices"][0]["text"] == "helloab"
        and found[1]["custom_id"] is None
        and sorted(found) == [1, 3]
    )


def test_a_line_in_every_form_that_work_has(server: Running) -> None:
    asked = {"prompt": "hello", "max_tokens": 2}
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    envelope = {"method": "POST", "url": "/v1/completions"}
    found = results(
        server,
        {"custom_id": "a", **asked},
        {"id": 7, **asked},
        {"custom_id": "b", **envelope, "body": asked},
        {"custom_id": "c", **chat},
        {"custom_id": "d", **envelope, "body": chat},
        {"custom_id": "e", **chat, "packed": True},
    )
    assert [found[line]["custom_id"] for line in (1, 2, 3, 4)] == ["a", "7", "b", "c"]
    assert {found[line]["choices"][0]["text"] for line in (1, 2, 3)} == {"ab"}
    alone = httpx.post(f"{server.url}/v1/chat/completions", json=chat).json()
    assert found[4]["choices"] == alone["choices"] and found[4]["object"] == "chat.completion"
    assert [found[line]["error"]["param"] for line in (5, 6)] == ["url", "packed"]


def test_packed_ids_and_logprobs(server: Running) -> None:
    row = {"custom_id": "p", "prompt": [97], "max_tokens": 4, "n": 2, "packed": True}
    found = results(server, {**row, "logprobs": 0}, row)
    for at, choice in enumerate(found[1]["choices"]):
        ids = np.frombuffer(base64.b64decode(choice["token_ids"]), "<i4")
        assert ids.tolist() == server.engine.spelling[at : at + 4] and "text" not in choice
        assert np.frombuffer(base64.b64decode(choice["logprobs"]), "<f4").tolist() == [-0.25] * 4
    assert (
        found[2]["choices"][0]["logprobs"] is None and found[2]["usage"]["completion_tokens"] == 8
    )


BROKEN = [
    (b"{", "JSON"),
    (b"[]", "object"),
    ({"custom_id": 7, "prompt": [1]}, "custom_id must be text"),
    ({"custom_id": "", "prompt": [1]}, "custom_id must have"),
    ({"custom_id": "a"}, "prompt is missing"),
    ({"prompt": [[1], [2]]}, "one prompt"),
    ({"prompt": ["a", "b"]}, "one prompt"),
    ({"prompt": []}, "one prompt"),
    ({"prompt": [1, 2.5]}, "no whole number"),
    ({"prompt": [256]}, "vocabulary"),
    ({"prompt": [1] * 256}, "context"),
    ({"prompt": [1], "stream": True}, "leave stream out"),
    ({"prompt": [1], "n": 0}, "n must be"),
    ({"prompt": [1], "tempreature": 1}, "tempreature"),
    ({"prompt": [1], "model": "other"}, "not served here"),
    ({"prompt": [1], "packed": 1}, "packed must be"),
    ({"prompt": [1], "packed": True, "logprobs": 2}, "logprobs must be 0"),
    ({"prompt": "a", "packed": True, "echo": True}, "leave echo out"),
    (b'{"prompt": "\xff"}', "UTF-8"),
]


def test_a_broken_line_is_told_and_the_others_go_on(server: Running) -> None:
    good = {"custom_id": "good", "prompt": [97], "max_tokens": 1}
    found = results(server, *(row for each, _ in BROKEN for row in (each, good)))
    for at, (_, says) in enumerate(BROKEN):
        assert says in found[2 * at + 1]["error"]["message"], found[2 * at + 1]
        assert found[2 * at + 2]["choices"][0]["text"] == "a"
    assert found[9]["custom_id"] == "a" and idle(server)


PIECES = [
    b'{"prompt": [97], "max_tokens": 1}',
    b'{"prompt":',
    b"[1]",
    b"null",
    b'"',
    b"\\u0000",
    b"\r",
    b"\x00",
    b"\xff",
    b"{}",
]


@given(st.lists(st.one_of(st.binary(max_size=30), st.sampled_from(PIECES)), max_size=12))
def test_any_bytes_are_answered_line_by_line(server: Running, pieces: list[bytes]) -> None:
    body = b"\n".join(pieces)
    answer = httpx.post(f"{server.url}/v1/bulk", content=body)
    lines = [at for at, line in enumerate(body.split(b"\n"), start=1) if line.strip()]
    assert answer.status_code == (200 if lines else 400)
    if lines:
        told = [json.loads(line) for line in answer.text.splitlines()]
        assert sorted(line["line"] for line in told) == lines
        assert all(("error" in line) != ("choices" in line) for line in told)
    assert idle(server)


def test_bodies_that_are_no_lines(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MOST_LINES", 10)
    for body, says in (
        (b"", "no lines"),
        (b"\n \n", "no lines"),
        (b"{}\n" * 10, "more than 10 lines"),
    ):
        answer = httpx.post(f"{server.url}/v1/bulk", content=body)
        assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_a_client_that_goes_away_cancels_what_it_asked(server: Running) -> None:
    server.hold(True)
    try:
        before = server.service.metrics.finished["abort"]
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as client:
            body = body_of(*({"prompt": [97], "max_tokens": 2} for _ in range(100)))
            head = (
                f"POST /v1/bulk HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            client.sendall(head.encode() + body)
            server.wait_for(lambda: len(server.engine.open) == 24)  # 16 rows and 8: the others wait
        server.wait_for(lambda: idle(server))
        assert server.service.metrics.finished["abort"] == before + 24
    finally:
        server.hold(False)


async def give_up(body: BufferedBody, server: Running) -> int:
    """Gives an answer up, and lets whoever waits go on for a while. Returns the number of lines
    that were asked for before."""
    body.give_up()
    asked = len(server.engine.submitted)
    for _ in range(200):
        await asyncio.sleep(0)
    return asked


@pytest.mark.parametrize("given_up", [False, True])
def test_a_slow_reader_holds_its_own_lines_back(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, given_up: bool
) -> None:
    """Of 8 MB of lines whose answers are as long again, with nobody reading: few are asked for,
    until somebody does; none at all once the answer was given up to make room for others."""
    held, hold = list[BufferedBody](), ResponseBudget.hold

    def noted(self: ResponseBudget, pieces: list[bytes]) -> BufferedBody:
        held.append(hold(self, pieces))
        return held[-1]

    monkeypatch.setattr(ResponseBudget, "hold", noted)
    monkeypatch.setattr(bulk, "WAITING", 65_536)
    with running_server(tokenizer, max_model_len=4096) as server:
        rows = [
            {"custom_id": f"{i}", "prompt": "y" * 1200, "max_tokens": 1, "echo": True}
            for i in range(6000)
        ]
        body = body_of(*rows)
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as client:
            close = f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            head = f"POST /v1/bulk HTTP/1.1\r\nhost: localhost\r\n{close}"
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 131072)
            client.sendall(head.encode() + body)
            asked = -1
            while asked != len(server.engine.submitted):
                asked = len(server.engine.submitted)
                time.sleep(0.3)
            assert asked < 6000, "lines were asked for whose answers nobody takes"
            if given_up:
                asked = server.on_loop(give_up(held[0], server))
                assert len(server.engine.submitted) == asked
                told = b"".join(iter(lambda: client.recv(1 << 20), b""))
                assert len(server.engine.submitted) == asked and not server.engine.open
                assert told.count(b'"custom_id":') < 6000
                return
            told = b"".join(iter(lambda: client.recv(1 << 20), b""))
        assert told.count(b'"custom_id":') == 6000 and len(server.engine.submitted) == 6000


def test_an_engine_that_dies_ends_all_of_it(tokenizer: Tokenizer) -> None:
    with running_server(tokenizer) as server:
        server.engine.alive = False
        found = results(server, {"prompt": [97]}, {"prompt": [98]})
        assert list(found) == [None] and found[None]["error"]["code"] == "engine_dead"


def test_keys_and_full_queues(tokenizer: Tokenizer) -> None:
    with running_server(
        tokenizer, api_key="secret", limits=HttpLimits(max_num_queued_reqs=4)
    ) as server:
        row = {"prompt": [97], "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/bulk", content=body_of(row)).status_code == 401
        found = results(server, *[row] * 50, headers={"authorization": "Bearer secret"})
        assert (
            len(found) == 50 and all("choices" in line for line in found.values()) and idle(server)
        )


def test_a_line_has_a_time_of_its_own(server: Running) -> None:
    server.hold(True)
    try:
        found = results(server, {"custom_id": "slow", "prompt": [97], "timeout": 0.05})
        assert found[1]["error"]["code"] == "timeout" and idle(server)
    finally:
        server.hold(False)
