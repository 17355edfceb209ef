"""What is refused while the queue is full: no body is waited for, the connection lives on, and the log has it."""

from __future__ import annotations

import contextlib
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from bare_http import CHAT, COMPLETIONS, connect, read_one, request
from server_fake import Running, running_server

from penstock.server.online.access_log import open_log
from penstock.server.online.api_keys import gather_keys
from penstock.server.online.auth import AccessPolicy
from penstock.server.openai.http_limits import HttpLimits
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

BOUND = 8
FULL = {"prompt": "x", "n": BOUND, "stream": True}


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    with running_server(tokenizer, limits=HttpLimits(max_num_queued_reqs=BOUND, header_seconds=0.5)) as running:
        yield running


def ask(*headers: str, path: str = COMPLETIONS, version: str = "1.1", **body: Any) -> bytes:
    return request({"prompt": "x", "max_tokens": 2} | body, *headers, path=path, version=version)


def is_refused(answer: tuple[bytes, bytes]) -> bool:
    head, body = answer
    code = json.loads(body)["error"]["code"]
    return head.startswith(b"HTTP/1.1 429 ") and b"\r\nretry-after: " in head and code == "queue_full"


def test_a_kept_connection_is_served_when_there_is_room(server: Running) -> None:
    with connect(server.url) as kept:
        kept.sendall(ask())
        assert b" 200 " in read_one(kept)[0]
        server.hold(True)
        with httpx.Client() as http, http.stream("POST", server.url + COMPLETIONS, json=FULL):
            for path in (COMPLETIONS, CHAT):
                data = ask(path=path, prompt="x" * 500)
                kept.sendall(data[:-300])  # the answer comes before the body has
                answer = read_one(kept)
                assert is_refused(answer) and b"connection: close" not in answer[0]
                kept.sendall(data[-300:-100])
                time.sleep(0.02)
                kept.sendall(data[-100:])
        server.hold(False)
        server.wait_for(lambda: server.service.request_limits.reqs.total == 0)
        kept.sendall(ask())
        head, body = read_one(kept)
        assert b" 200 " in head and json.loads(body)["choices"][0]["text"] == "ab"


def test_what_the_application_says_first_it_still_says(server: Running) -> None:
    """Other paths and methods, and who asks before it sends its body, come to the application."""
    server.hold(True)
    with httpx.Client() as http, http.stream("POST", server.url + COMPLETIONS, json=FULL):
        assert http.get(server.url + COMPLETIONS).status_code == 405
        assert http.post(server.url + COMPLETIONS + "x").status_code == 404
        assert http.get(server.url + "/v1/models").status_code == 200
        assert http.post(server.url + COMPLETIONS, headers={"host": "evil.example"}, json={}).status_code == 403
        assert http.post(server.url + COMPLETIONS + "?a=b", json={}).status_code == 429
        with connect(server.url) as asking:
            asking.sendall(ask("expect: 100-continue").partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
            assert is_refused(read_one(asking))
    server.hold(False)
    server.wait_for(lambda: server.service.request_limits.reqs.total == 0)


def test_keys_have_their_own_rooms(tokenizer: Tokenizer) -> None:
    access = AccessPolicy(keys=gather_keys(["busy", "calm"], None, {}))
    with running_server(tokenizer, access=access, limits=HttpLimits(max_num_queued_reqs=BOUND)) as server:
        server.hold(True)
        with httpx.Client(base_url=server.url) as http:
            bearer = {name: {"authorization": f"Bearer {name}"} for name in ("busy", "calm", "wrong")}
            with http.stream("POST", COMPLETIONS, json=FULL | {"n": 6}, headers=bearer["busy"]):
                assert http.post(COMPLETIONS, json={"prompt": "x"}, headers=bearer["busy"]).status_code == 429
                assert http.post(COMPLETIONS, json={"prompt": "x"}, headers=bearer["wrong"]).status_code == 401
                assert http.post(COMPLETIONS, json={"prompt": ""}, headers=bearer["calm"]).status_code == 400
            server.hold(False)


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """Files of this process may have so many bytes, as if the disk were full."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_lines_that_find_no_room_are_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "log"
    with open_log(str(place)) as log:
        with room_for(15):
            for number in range(4):
                log.write(b'{"line":%d}\n' % number)
        log.write(b'{"line":4}\n')
        log.write(b'{"line":5}\n')
    assert place.read_text().splitlines() == ['{"line":0}', '{"li', '{"line":4}', '{"line":5}']
    said = "penstock: lines of the access log are lost (no room): see that they can be written\n"
    assert capsys.readouterr().err == said
