"""A request leaves nothing behind that only the garbage collector could take away: it comes seldom
while we serve.

The real server in this process on its own loop, over a fake engine's process; clients are plain
sockets in a thread, which make no cycles of their own. The collector is off; what it finds when it
is asked is counted.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
import uvloop
from bare_http import CLOSE, COMPLETIONS, connect, read_all, request
from fake_runner import Orders
from in_loop import Here, serving_here
from service import HANG, make_folder

from penstock.server.batch.state_folder import opened
from penstock.server.openai.http_limits import HttpLimits

pytestmark = pytest.mark.torch

ROUNDS = 10
ASKED = {"prompt": [5] * 20, "max_tokens": 3, "seed": 1}
QUEUE = 50


def kept(port: int) -> None:
    """Three on one connection, which the client closes."""
    data = request(ASKED)
    with connect(f"http://127.0.0.1:{port}") as connection:
        for _ in range(3):
            connection.sendall(data)
            said = HTTPResponse(connection)  # an answer may come in pieces
            said.begin()
            assert said.status == 200 and said.read()


def more_than_there_is_room_for(port: int) -> None:
    """Refused when its body is read, beside one that is open."""
    with _opened(port, 1):
        assert _said(port, raw(ASKED | {"n": QUEUE})).startswith(b"HTTP/1.1 429 ")


def turned_away(port: int) -> None:
    """Refused by its head, while the queue is full."""
    with _opened(port, QUEUE):
        assert _said(port, raw(ASKED)).startswith(b"HTTP/1.1 429 ")


def cut(port: int) -> None:
    """The client goes away in its body, before the answer, and in the stream; once with a reset."""
    data = raw(ASKED | {"max_tokens": 200, "stream": True})
    for sent, heard in ((len(data) // 2, 0), (len(data), 0), (len(data), 12)):
        with connect(f"http://127.0.0.1:{port}") as connection:
            connection.sendall(data[:sent])
            if heard:
                connection.recv(heard)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def two_at_once(port: int) -> None:
    """The second waits behind the first, and the client doesn't."""
    with connect(f"http://127.0.0.1:{port}") as connection:
        connection.sendall(request(ASKED | {"max_tokens": 100}) * 2)
        time.sleep(0.005)


def uploaded(port: int) -> None:
    _delete(port, _upload(port))


def badly_uploaded(port: int) -> None:
    """A form that breaks off, and one that is none."""
    assert _said(port, _form(FORM[:-10])).startswith(b"HTTP/1.1 400 ")
    assert _said(port, _form(FORM.replace(b'name="purpose"', b"purpose"))).startswith(
        b"HTTP/1.1 400 "
    )


def batch(port: int) -> None:
    """Run to its end, a good line and then bad ones; looked at, its files fetched and deleted."""
    given = _upload(port)
    wish = {"input_file_id": given, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = json.loads(_body(_said(port, raw(wish, path="/v1/batches"))))["id"]
    while (said := json.loads(_body(_said(port, _bare("GET", f"/v1/batches/{batch_id}")))))[
        "status"
    ] != "completed":
        time.sleep(0.01)
    for file_id in (given, said["output_file_id"], said["error_file_id"]):
        assert b"custom_id" in _body(_said(port, _bare("GET", f"/v1/files/{file_id}/content")))
        _delete(port, file_id)


LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "fake", **ASKED},
}
FORM = (
    b'--X\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--X\r\ncontent-disposition: form-data; name="file"; filename="in"\r\n\r\n'
    + (json.dumps(LINE).encode() + b"\n") * 2
    + b'{"custom_id": 5}\n\r\n--X--\r\n'
)


def raw(body: bytes | dict[str, Any], *headers: str, path: str = COMPLETIONS) -> bytes:
    return request(body, CLOSE, *headers, path=path)


def _form(data: bytes) -> bytes:
    return raw(data, "content-type: multipart/form-data; boundary=X", path="/v1/files")


def _bare(method: str, path: str) -> bytes:
    return request(b"", CLOSE, method=method, path=path)


def _body(answer: bytes) -> bytes:
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    return answer.partition(b"\r\n\r\n")[2]


def _upload(port: int) -> str:
    return str(json.loads(_body(_said(port, _form(FORM))))["id"])


def _delete(port: int, file_id: str) -> None:
    _body(_said(port, _bare("DELETE", f"/v1/files/{file_id}")))


# What is sent, on a connection of its own, and what the answer holds.
ASKED_AND_TOLD = {
    "whole": (raw(ASKED), b"HTTP/1.1 200 "),
    "streamed": (raw(ASKED | {"stream": True, "n": 2}), b"data: [DONE]"),
    "several prompts": (raw(ASKED | {"stream": True, "prompt": [[5], [6]]}), b"data: [DONE]"),
    "bad": (raw({"prompt": 5}), b"HTTP/1.1 400 "),
    "nowhere": (raw(ASKED, path="/no/such"), b"HTTP/1.1 404 "),
    "no HTTP": (b"nonsense\r\n\r\n", b"HTTP/1.1 400 "),
    "too large": (raw(ASKED, path="/" + "x" * 70_000), b"HTTP/1.1 431 "),
    "too late": (raw(ASKED | {"max_tokens": 200, "timeout": 0.01}), b"HTTP/1.1 408 "),
}


def _asks(data: bytes, told: bytes) -> Callable[[int], None]:
    def ask(port: int) -> None:
        assert told in _said(port, data)

    return ask


KINDS: dict[str, Callable[[int], None]] = {
    name: _asks(*case) for name, case in ASKED_AND_TOLD.items()
} | {
    kind.__name__: kind
    for kind in (
        kept,
        more_than_there_is_room_for,
        turned_away,
        cut,
        two_at_once,
        uploaded,
        badly_uploaded,
        batch,
    )
}


def _said(port: int, data: bytes) -> bytes:
    with connect(f"http://127.0.0.1:{port}") as connection:
        connection.sendall(data)
        return read_all(connection)


def _opened(port: int, samples: int) -> socket.socket:
    """A stream that goes on until it is closed; asked again where the one before it is not quite
    gone."""
    while True:
        connection = connect(f"http://127.0.0.1:{port}")
        connection.sendall(raw(ASKED | {"max_tokens": 200, "stream": True, "n": samples}))
        if connection.recv(12) == b"HTTP/1.1 200":
            return connection
        connection.close()


@contextmanager
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def _left_by(here: Here, kind: Any) -> Counter[str]:
    """Types of what the collector finds after ROUNDS of a kind, and one of each before that, which
    may warm things."""

    def rounds(count: int) -> None:
        for _ in range(count):
            kind(here.port)

    await asyncio.to_thread(rounds, 2)
    await here.rest(HANG)
    with collector_off():
        await asyncio.to_thread(rounds, ROUNDS)
        left = await here.rest(HANG)
        assert not any(left.values()), (kind, left)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.garbage)


def test_nothing_waits_for_the_collector(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_folder(tmp_path, Orders(step_seconds=0.001), rows=64, num_blocks=1024, longest=256)
    found: dict[str, Counter[str]] = {}

    async def main() -> None:
        limits = HttpLimits(drain_seconds=1, max_num_queued_reqs=QUEUE)
        with opened(tmp_path / "state") as state:
            async with serving_here(tmp_path, limits, state) as here:
                for name, kind in KINDS.items():
                    found[name] = await _left_by(here, kind)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    for name, left in found.items():
        print(name, left.total(), dict(left.most_common(8)))
    # nor was one a fault
    assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text
    # an object a request
    many = {name: left for name, left in found.items() if left.total() >= ROUNDS}
    assert not many, json.dumps({name: left.most_common(12) for name, left in many.items()})
