"""One of the load's client processes: `python -m penstock.jobs.shapes_client`, started by shapes_http.py.

It reads a line of JSON (where, and the bodies), connects once a body, says "ready", waits for "go", posts every body at
once, and writes one line of JSON with what came back. Made to cost little: uvloop, httptools' parser, events counted
and thrown away, tokens taken from `usage` at the end. It knows OpenAI's completions over HTTP and no engine.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import httptools
import msgspec
import uvloop

TAIL = 4096  # bytes of a stream that are kept: its usage comes last
EVENT = b"data: {"
UNSENT = -1.0


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Answer(msgspec.Struct):
    """All that is read of an answer, or of an event."""

    usage: Usage | None = None


class Spec(msgspec.Struct):
    """seconds: after so long what isn't done is closed."""

    host: str
    port: int
    path: str
    bodies: list[msgspec.Raw]
    stream: bool
    seconds: float


@dataclass(slots=True)
class Post:
    """One request and what came of it; times of the monotonic clock, which all processes of a machine share."""

    body: bytes
    status: int = 0
    start: float = UNSENT
    first: float = UNSENT
    end: float = UNSENT
    events: int = 0
    kept: bytearray = field(default_factory=bytearray)
    error: str | None = None

    def row(self) -> dict[str, Any]:
        usage = self._usage()
        return {
            "start": self.start,
            "first": self.first,
            "end": self.end,
            "events": self.events,
            "prompt_tokens": usage.prompt_tokens if usage else 0,
            "tokens": usage.completion_tokens if usage else 0,
            "error": self.error or (None if usage or self.end == UNSENT else f"no usage (status {self.status})"),
        }

    def _usage(self) -> Usage | None:
        if self.status != 200 or self.end == UNSENT or self.error:
            return None
        lines = [line[6:] for line in bytes(self.kept).split(b"\n") if line.startswith(EVENT)] or [bytes(self.kept)]
        for line in reversed(lines):
            try:
                usage = msgspec.json.decode(line, type=Answer).usage
            except msgspec.DecodeError:  # the first line of the tail is cut
                continue
            if usage is not None:
                return usage
        return None


class Exchange(asyncio.Protocol):
    """A connection that posts one body and hears the answer. httptools calls on_body, on_headers_complete and so on."""

    def __init__(self, post: Post, stream: bool, done: asyncio.Future[None]) -> None:
        self._post, self._stream, self._done = post, stream, done
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class is none of asyncio's

    def send(self, head: bytes) -> None:
        assert self.transport is not None
        self._post.start = time.monotonic()
        self.transport.write(head + self._post.body)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"no HTTP: {error}")

    def on_headers_complete(self) -> None:
        self._post.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        post = self._post
        if post.first == UNSENT:
            post.first = time.monotonic()
        post.kept += data
        if self._stream and post.status == 200:
            post.events += data.count(EVENT)
            if len(post.kept) > 4 * TAIL:
                del post.kept[:-TAIL]

    def on_message_complete(self) -> None:
        self._post.end = time.monotonic()
        wrong = None if self._post.status == 200 else f"status {self._post.status}: {bytes(self._post.kept[:300])!r}"
        self._end(wrong)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"the connection was lost ({error or 'closed by the server'})")

    def _end(self, error: str | None) -> None:
        if not self._done.done():
            self._post.error = error
            self._done.set_result(None)


async def post_all(spec: Spec) -> list[Post]:
    """Connects, waits for "go", posts all at once; comes back when all have ended or the time has."""
    loop = asyncio.get_running_loop()
    posts = [Post(bytes(body)) for body in spec.bodies]
    ends = [loop.create_future() for _ in posts]
    exchanges = []
    for post, end in zip(posts, ends, strict=True):
        exchange = Exchange(post, spec.stream, end)
        await loop.create_connection(partial(_as_is, exchange), spec.host, spec.port)
        exchanges.append(exchange)
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    for post, exchange in zip(posts, exchanges, strict=True):
        exchange.send(_head(spec, len(post.body)))
    await asyncio.wait(ends, timeout=spec.seconds)
    for exchange in exchanges:
        assert exchange.transport is not None
        exchange.transport.abort()
    return posts


def _as_is(exchange: Exchange) -> Exchange:
    return exchange


def _head(spec: Spec, length: int) -> bytes:
    return (
        f"POST {spec.path} HTTP/1.1\r\nhost: {spec.host}:{spec.port}\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


def main() -> int:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    spec = msgspec.json.decode(sys.stdin.readline(), type=Spec)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        posts = runner.run(post_all(spec))
    print(msgspec.json.encode([post.row() for post in posts]).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
