"""Limits of a connection: heads that are large, slow or no HTTP, readers that don't read,
crowds."""

from __future__ import annotations

import json
import resource
import select
import socket
import struct
import time
from collections.abc import Iterator

import httpx
import pytest
from bare_http import COMPLETIONS, connect, exchange, read_all, read_one, request
from server_fake import Running, running_server

from penstock.server.api_server.http_protocol import SPARE, most_connections
from penstock.server.openai.http_limits import HttpLimits
from penstock.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

GET = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"


SECONDS = 1000.0  # of each limit, by a clock that tests set forward


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    limits = HttpLimits(
        header_seconds=SECONDS,
        max_header_bytes=16_384,
        stall_seconds=SECONDS,
        body_seconds=SECONDS,
    )
    with running_server(tokenizer, limits=limits) as running:
        yield running


def said(connection: socket.socket) -> bool:
    """Whether the server has answered or ended the connection."""
    return bool(select.select([connection], [], [], 0.02)[0])


def test_slow_heads_end_and_silent_connections_too(server: Running) -> None:
    with connect(server.url) as silent, connect(server.url) as slow:
        slow.sendall(GET + b"x: ")
        while not said(slow):
            slow.sendall(b"y")
            server.pass_time(SECONDS / 10)
        assert read_one(slow)[0].startswith(b"HTTP/1.1 408 ")
        assert read_all(silent) == b""


def test_a_second_head_has_its_time_too(server: Running) -> None:
    with connect(server.url) as kept:
        kept.sendall(GET + b"\r\n")
        assert read_one(kept)[0].startswith(b"HTTP/1.1 200 ")
        server.pass_time(2 * SECONDS)  # between requests it may wait
        kept.sendall(GET + b"\r\n")
        assert read_one(kept)[0].startswith(b"HTTP/1.1 200 ")
        kept.sendall(b"\r\nGET /v1")
        while not said(kept):
            server.pass_time(2 * SECONDS)
        assert read_all(kept).startswith(b"HTTP/1.1 408 ")


def test_one_byte_at_a_time(server: Running) -> None:
    with connect(server.url) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request({"prompt": "x" * 50, "max_tokens": 1}, "connection: close"):
            connection.sendall(bytes([byte]))
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_pipelined_requests_and_large_ones_one_behind_the_other(server: Running) -> None:
    last = GET + b"connection: close\r\n\r\n"
    with connect(server.url) as connection:
        connection.sendall(
            (GET + b"x: " + b"y" * 10_000 + b"\r\n\r\n") * 5
            + request({"prompt": "x", "max_tokens": 1})
            + last
        )
        assert read_all(connection).count(b"HTTP/1.1 200 ") == 7


def begin_stream(server: Running, connection: socket.socket) -> bytes:
    """Sends a request whose stream is held after its first bytes, which are returned."""
    server.engine.step_seconds = 1000
    connection.sendall(request({"prompt": "x", "max_tokens": 50, "stream": True}))
    head = b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(65_536)
    assert head.startswith(b"HTTP/1.1 200 ")
    return head


@pytest.fixture
def held(server: Running) -> Iterator[Running]:
    before = len(server.engine.submitted)
    yield server
    server.engine.step_seconds = 0
    server.wait_for(lambda: not server.engine.open)
    assert len(server.engine.submitted) == before + 1 and server.engine.submitted[-1].cancelled


def test_garbage_behind_a_request_that_waits_is_no_part_of_a_stream(held: Running) -> None:
    with connect(held.url) as connection:
        begin_stream(held, connection)
        connection.sendall(GET + b"\r\n" + b"\x00garbage\r\n\r\n")
        assert b"HTTP/1.1" not in read_all(connection)


def test_many_heads_that_ask_for_another_protocol(server: Running) -> None:
    """One behind the other, in one read: no depth of calls comes of it."""
    asks = GET + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n"
    with connect(server.url) as connection:
        connection.sendall(asks * 20 + GET + b"connection: close\r\n\r\n")
        assert read_all(connection).count(b"HTTP/1.1 200 ") == 21


CHUNKED = request(b"", "transfer-encoding: chunked")


def test_trailers_are_read_by_nobody(server: Running) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    whole = CHUNKED + b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    with connect(server.url) as connection:
        connection.sendall(
            whole + b"expect: 100-continue\r\nhost: elsewhere\r\n" + b"a:b\r\n" * 1_000 + b"\r\n"
        )
        assert read_one(connection)[0].startswith(b"HTTP/1.1 200 ")
        connection.sendall(GET + b"\r\n")
        assert read_one(connection)[0].startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "endless",
    [b"0\r\n" + b"a:b\r\n" * 500_000, b"0\r\na: " + b"b" * 2_000_000, b"1;a=" + b"b" * 2_000_000],
)
def test_what_stands_around_a_body_has_a_bound(server: Running, endless: bytes) -> None:
    """Trailers, one trailer, what follows a chunk's size: each could go on for ever."""
    status, body = exchange(server.url, CHUNKED + b"1\r\n{\r\n" + endless)
    assert (status, json.loads(body)["error"]["code"]) == (431, "headers_too_large")


def test_who_has_its_answer_gets_no_other(server: Running) -> None:
    head = CHUNKED.replace(COMPLETIONS.encode(), b"/no/such")
    with connect(server.url) as connection:
        connection.sendall(head)
        assert read_one(connection)[0].startswith(b"HTTP/1.1 404 ")
        connection.sendall(b"no chunk\r\n")
        assert read_all(connection) == b""


def test_a_client_that_asks_for_http2_is_served_without(server: Running) -> None:
    asks = (
        "connection: Upgrade, HTTP2-Settings",
        "upgrade: h2c",
        "http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA",
    )
    with connect(server.url) as connection:
        connection.sendall(request({"prompt": "x", "max_tokens": 3}, *asks))
        assert b'"text":"abc"' in read_one(connection)[1]
        data = request({"prompt": "x", "max_tokens": 2}, *asks)
        connection.sendall(data[:-5])
        time.sleep(0.05)
        connection.sendall(data[-5:])
        assert b'"text":"ab"' in read_one(connection)[1]


def test_a_reader_that_takes_nothing_is_ended_and_its_request_with_it(server: Running) -> None:
    with connect(server.url) as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.sendall(request({"prompt": ["x"] * 100, "n": 100, "max_tokens": 200, "stream": True}))
        server.wait_for(lambda: len(server.engine.open) == 100)
        while server.engine.open:
            server.pass_time(2 * SECONDS)
    assert all(made.cancelled for made in server.engine.submitted[-100:])
    assert httpx.post(server.url + COMPLETIONS, json={"prompt": "x"}).status_code == 200


def test_a_reset_in_the_middle_leaves_nothing(server: Running) -> None:
    with connect(server.url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(request({"prompt": "x", "max_tokens": 200, "stream": True}))
        connection.recv(100)
    server.wait_for(lambda: not server.engine.open)


BEHIND_MOST = [
    pytest.param(b"", id="silent"),
    pytest.param(GET[:20], id="half a head"),
    pytest.param(GET + b"\r\n", id="answered"),
    pytest.param(
        b"POST /no/such HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n",
        id="its body not sent",
    ),
    pytest.param(b"\x00\r\n", id="refused"),
]


@pytest.mark.parametrize("sent", BEHIND_MOST)
def test_who_waits_for_no_answer_makes_room_for_another(tokenizer: Tokenizer, sent: bytes) -> None:
    """The oldest first; not who waits for one, however old."""
    limits = HttpLimits(max_connections=3, header_seconds=1e4)
    with running_server(tokenizer, limits=limits) as server, connect(server.url) as waits:
        server.hold(True)
        waits.sendall(request({"prompt": "x", "max_tokens": 3}))
        server.wait_for(lambda: server.engine.open)
        crowd = []
        for _ in range(3 + SPARE + 5):
            crowd.append(connect(server.url))
            crowd[-1].sendall(sent)
            if sent.endswith(b"\r\n"):
                assert read_one(crowd[-1])[0].startswith(b"HTTP/1.1 ")
        for path in ("/health", "/health/live", "/metrics", "/v1/models"):
            for _ in range(5):
                assert httpx.get(server.url + path).status_code == 200
        assert ended(crowd[0])
        if sent == GET + b"\r\n":
            crowd[-1].sendall(sent)
            assert read_one(crowd[-1])[0].startswith(b"HTTP/1.1 200 ")
        server.hold(False)
        assert b'"text":"abc"' in read_one(waits)[1]
        for each in crowd:
            each.close()


def ended(connection: socket.socket) -> bool:
    try:
        return read_all(connection) == b""
    except ConnectionResetError:
        return True


def test_where_files_are_served_each_connection_may_hold_two_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    for files in (False, True):
        most = most_connections(HttpLimits(), files=files)
        assert most > 300 and (1 + files) * most + SPARE <= 1024 - 256


def test_a_crowd(tokenizer: Tokenizer) -> None:
    """As many as there may be wait for answers: the next is told, and probes are answered."""
    with running_server(tokenizer, limits=HttpLimits(max_connections=3)) as server:
        server.hold(True)
        crowd = [connect(server.url) for _ in range(3)]
        for each in crowd:
            each.sendall(request({"prompt": "x", "max_tokens": 1}))
        server.wait_for(lambda: len(server.engine.open) == 3)
        with httpx.Client() as http:
            full = http.get(server.url + "/v1/models")
            assert (full.status_code, full.json()["error"]["code"]) == (429, "too_many_connections")
            assert full.headers["retry-after"] == "1"
        for path in ("/health", "/health/live", "/metrics"):
            assert httpx.get(server.url + path).status_code == 200
        server.hold(False)
        for each in crowd:
            assert read_one(each)[0].startswith(b"HTTP/1.1 200 ")
            each.close()
        assert httpx.get(server.url + "/v1/models").status_code == 200
