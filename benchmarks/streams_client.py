"""A client process of streams.py: `python benchmarks/streams_client.py`, with a line of JSON on
standard input.

Connects a socket a stream, says "ready", waits for "go", posts all bodies at once, and records
which bytes came when. Nothing is parsed before the last stream has ended, so that no figure
includes the client's own time. Then it writes an .npz and says "done". Knows OpenAI's completions
over HTTP, as bytes.
"""

from __future__ import annotations

import asyncio
import gc
import re
import sys
import time
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
import uvloop

TEXT = re.compile(rb'"text":"([a-z]*)"')
PATH = "/v1/completions"


class Spec(msgspec.Struct):
    """The client's work. body: the body to post. words: the texts, of equal length, that streams
    consist of. out: the .npz to write."""

    port: int
    count: int
    body: msgspec.Raw
    words: list[str]
    seconds: float
    out: str


class Stream(asyncio.Protocol):
    """One connection: the received bytes and their times."""

    def __init__(self, done: asyncio.Future[None]) -> None:
        self.times: list[float] = []
        self.pieces: list[bytes] = []
        self.posted = 0.0
        self.done = done
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.times.append(time.monotonic())
        self.pieces.append(data)
        if data.endswith(b"\r\n0\r\n\r\n") and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def post(self, data: bytes) -> None:
        assert self.transport is not None
        self.posted = time.monotonic()
        self.transport.write(data)


async def run(spec: Spec) -> list[Stream]:
    loop = asyncio.get_running_loop()
    streams = [Stream(loop.create_future()) for _ in range(spec.count)]
    for stream in streams:
        await loop.create_connection(partial(_as_is, stream), "127.0.0.1", spec.port)
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length:"
        f" {len(bytes(spec.body))}\r\n\r\n".encode()
    )
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    gc.freeze()
    gc.disable()
    for stream in streams:
        stream.post(head + bytes(spec.body))
    await asyncio.wait([stream.done for stream in streams], timeout=spec.seconds)
    for stream in streams:
        assert stream.transport is not None
        stream.transport.abort()
    return streams


def _as_is(stream: Stream) -> Stream:
    return stream


def columns(streams: list[Stream], words: list[str]) -> dict[str, Any]:
    """Returns columns of all events: the stream, the arrival, and the tokens (CSR, as indices into
    words)."""
    width = len(words[0])
    spelled = np.array([word.encode() for word in words], f"S{width}")
    order = np.argsort(spelled)
    arrival, stream_of, count, tokens = [], [], [], []
    for number, stream in enumerate(streams):
        data = b"".join(stream.pieces)
        if not data.startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"a stream was refused: {data[:300]!r}")
        ends = np.cumsum([len(piece) for piece in stream.pieces])
        found = list(TEXT.finditer(data))
        came = np.searchsorted(ends, [match.end() for match in found])
        texts = [match[1] for match in found]
        letters = np.frombuffer(b"".join(texts), f"S{width}")
        place = np.searchsorted(spelled, letters, sorter=order).clip(max=len(words) - 1)
        if (spelled[order[place]] != letters).any():
            raise SystemExit(f"a stream has text that no step wrote: {texts[:3]}")
        arrival.append(np.array(stream.times)[came])
        stream_of.append(np.full(len(found), number))
        count.append(np.array([len(text) // width for text in texts]))
        tokens.append(order[place])
    return {
        "arrival": np.concatenate(arrival),
        "stream": np.concatenate(stream_of),
        "count": np.concatenate(count),
        "tokens": np.concatenate(tokens),
        "posted": np.array([stream.posted for stream in streams]),
        "whole": np.array([b"data: [DONE]" in b"".join(stream.pieces[-3:]) for stream in streams]),
    }


def main() -> int:
    spec = msgspec.json.decode(sys.stdin.readline(), type=Spec)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        streams = runner.run(run(spec))
    np.savez(spec.out, **columns(streams, spec.words))
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
