"""A server that misbehaves on demand: a body's `behave` says how. It runs in a thread of the test's
process."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from types import TracebackType
from typing import Any

USAGE = {
    "prompt_tokens": 4,
    "completion_tokens": 3,
    "total_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 2},
}
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
DONE = b"data: [DONE]\n\n"
Writer = asyncio.StreamWriter


def event(text: str = "a", finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], "usage": None, **more}).encode() + b"\n\n"


def usage_event(**changed: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": {**USAGE, **changed}}).encode() + b"\n\n"


EVENTS = [event(), event("b"), event("c"), event("", "length"), usage_event(), DONE]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunked(events: list[bytes], *, whole: bool = True) -> bytes:
    return CHUNKED + b"".join(map(chunk, events)) + (b"0\r\n\r\n" if whole else b"")


def with_length(
    body: bytes, kind: bytes = b"text/event-stream", status: bytes = b"200 OK"
) -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        kind,
        len(body),
        body,
    )


# What is sent, then kept open unless the name is in CLOSES.
SENDS: dict[str, bytes] = {
    "good": chunked(EVENTS),
    "good, content-length": with_length(b"".join(EVENTS)),
    "good, until the end": b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(EVENTS),
    "good, events in one chunk": chunked([b"".join(EVENTS)]),
    "good, carriage returns": chunked([each.replace(b"\n", b"\r\n") for each in EVENTS]),
    "good, no spaces": chunked([each.replace(b"data: ", b"data:") for each in EVENTS]),
    "good, comments": chunked([b": ping\n\n", b"event: x\nid: 1\nretry: 9\n\n", *EVENTS]),
    "good, continue first": b"HTTP/1.1 100 Continue\r\n\r\n" + chunked(EVENTS),
    "good, no DONE": chunked(EVENTS[:-1]),
    "good, close": chunked(EVENTS).replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1),
    "good, role first": chunked(
        [b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n', *EVENTS]
    ),
    "503": with_length(b'{"error":"busy"}', b"application/json", b"503 Service Unavailable"),
    "500 without a length": b"HTTP/1.1 500 Oh\r\n\r\nno",
    "an error in the stream": chunked(
        [event(), b'data: {"error":{"message":"out of memory","code":500}}\n\n', DONE]
    ),
    "nothing": b"",
    "nothing after two events": chunked(EVENTS[:2], whole=False),
    "closed at once": b"",
    "closed after two events": chunked(EVENTS[:2], whole=False),
    "ended after two events": chunked(EVENTS[:2]),
    "ended within a line": chunked([event(), event()[:-20]]),
    "garbage": b"\x16\x03\x01 hello\r\n\r\n",
    "a page": with_length(b"<html>welcome</html>\n", b"text/html"),
    "a line of nothing": chunked([event(), b"hello\n\n", *EVENTS]),
    "no JSON": chunked([event(), b'data: {"choices": [}\n\n', *EVENTS]),
    "a list": chunked([event(), b"data: [1, 2]\n\n", *EVENTS]),
    "text that is a number": chunked([event(), b'data: {"choices": [{"text": 5}]}\n\n', *EVENTS]),
    "no UTF-8": chunked([event(), b'data: {"choices": [{"text": "\xff"}]}\n\n', *EVENTS]),
    "a deep one": chunked(
        [event(), b'data: {"error": ' + b"[" * 9999 + b"]" * 9999 + b"}\n\n", *EVENTS]
    ),
    "an event after DONE": chunked([*EVENTS, event(), DONE]),
    "a bad chunk": CHUNKED + b"zz\r\nhello\r\n",
    "an endless line": CHUNKED + b"%x\r\ndata: {" % (1 << 30) + b"x" * (1 << 20),
    "an endless head": b"HTTP/1.1 200 OK\r\nx-more: " + b"x" * (1 << 20),
    "heads without end": b"HTTP/1.1 200 OK\r\n" + b"x-more: x\r\n" * 100_000,
    "an endless trailer": chunked(EVENTS, whole=False) + b"0\r\nx-more: " + b"x" * (1 << 20),
    "continue without end": b"HTTP/1.1 100 Continue\r\n\r\n" * 50_000,
    "events without end": chunked([event()] * 20_000, whole=False),
    "no usage": chunked([*EVENTS[:4], DONE]),
    "fewer tokens than events": chunked(
        [*EVENTS[:4], usage_event(completion_tokens=2, total_tokens=6), DONE]
    ),
    "a wrong sum": chunked([*EVENTS[:4], usage_event(total_tokens=70), DONE]),
    "more cached than sent": chunked(
        [*EVENTS[:4], usage_event(prompt_tokens_details={"cached_tokens": 5}), DONE]
    ),
    "a negative usage": chunked([*EVENTS[:4], usage_event(completion_tokens=-1), DONE]),
    "a usage of words": chunked([*EVENTS[:4], usage_event(completion_tokens="three"), DONE]),
    "a usage past all ends": chunked([*EVENTS[:4], usage_event(completion_tokens=10**30), DONE]),
    "tokens without events": chunked([event(""), *EVENTS[3:]]),
    "more out than asked": chunked(
        [*EVENTS[:4], usage_event(completion_tokens=5, total_tokens=9), DONE]
    ),
    "fewer out than asked": chunked(
        [*EVENTS[:2], usage_event(completion_tokens=2, total_tokens=6), DONE]
    ),
    "another prompt": chunked([*EVENTS[:4], usage_event(prompt_tokens=5, total_tokens=8), DONE]),
}
CLOSES = {
    "good, until the end",
    "500 without a length",
    "closed at once",
    "closed after two events",
    "garbage",
    "good, close",
}


class HostileServer:
    """`url` while the context is open. seen: heads of the requests. crowd: none is answered before
    so many have come."""

    def __init__(self, tls: ssl.SSLContext | None = None, crowd: int = 1) -> None:
        self._crowd = crowd
        self.seen: list[bytes] = []
        self.connections = 0
        self._tls = tls
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._end: asyncio.Event

    def __enter__(self) -> HostileServer:
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._run(),), daemon=True
        )
        self._thread.start()
        assert self._ready.wait(600)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(600)

    async def _run(self) -> None:
        self._end = asyncio.Event()
        server = await asyncio.start_server(self._meet, "127.0.0.1", 0, ssl=self._tls)
        port = server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{port}"
        self._ready.set()
        await self._end.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _meet(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                behave = json.loads(await reader.readexactly(length))["behave"]
                self.seen.append(head)
                while len(self.seen) < self._crowd:
                    await asyncio.sleep(0.005)
                await _send(writer, behave)
                if behave in CLOSES:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the client went away
        finally:
            writer.close()


async def _send(writer: Writer, behave: str) -> None:
    """In pieces where the name says so; else at once."""
    size = {"good, byte by byte": 1, "good, in pieces of 7": 7}.get(behave, 1 << 20)
    data = SENDS.get(behave, SENDS["good"])
    for at in range(0, len(data), size):
        writer.write(data[at : at + size])
        await writer.drain()
        if size < 100:
            await asyncio.sleep(0)
