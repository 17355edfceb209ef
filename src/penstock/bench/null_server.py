"""A server that computes nothing. It is started by `python -m penstock.bench.null_server`, to
measure the client alone. Sends prebuilt events of OpenAI's completions with a correct usage: the
whole answer at once (step 0), or an event to all streams every `step` seconds. Several processes
share the port by SO_REUSEPORT. Knows no model and no load.
"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import cast

import httptools
import msgspec
import uvloop

from penstock.errors import CapacityError

HOST = "127.0.0.1"


class NullPlan(msgspec.Struct):
    """Settings of the server. step: seconds between two events of a stream, sent to all streams at
    the same instants; 0: the whole answer at once."""

    step: float = 0.0


# --- answers of the null server


class NullRequest(msgspec.Struct):
    """The fields of a request's body that the server reads."""

    prompt: str | list[int] = ""
    max_tokens: int = 16


_read = msgspec.json.Decoder(NullRequest).decode  # raises msgspec.DecodeError for an invalid body
_TOP = (
    b"data:"
    b' {"id":"cmpl-3f2b8a7c6d5e4f3a2b1c0d9e8f7a6b5c","object":"text_completion","created":1763680000,'
)
_CHOICE = (
    _TOP + b'"model":"null","choices":[{"index":0,"text":"'
    b' word","logprobs":null,"finish_reason":%b,"stop_reason":null}],"usage":null}\n\n'
)
_USAGE = (
    _TOP
    + b'"model":"null","choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
    b'"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENT, _LAST, _DONE = (
    _chunk(_CHOICE % b"null"),
    _chunk(_CHOICE % b'"length"'),
    _chunk(b"data: [DONE]\n\n"),
)
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding:"
    b" chunked\r\n\r\n"
)
_REFUSED = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n"


def ending(asked: NullRequest) -> bytes:
    """Returns the bytes that end a stream: its last event, its usage and [DONE]."""
    prompt = len(asked.prompt.split()) if isinstance(asked.prompt, str) else len(asked.prompt)
    usage = _USAGE % (prompt, asked.max_tokens, prompt + asked.max_tokens)
    return _LAST + _chunk(usage) + _DONE + b"0\r\n\r\n"


# --- a process of the null server


class StepClock:
    """The streams of a process, which all get their events at the same instants."""

    def __init__(self, step: float) -> None:
        self.step = step
        self.streams: dict[NullVisit, None] = {}

    def add(self, visit: NullVisit) -> None:
        self.streams[visit] = None
        if len(self.streams) == 1:
            due = time.monotonic() + self.step
            asyncio.get_running_loop().call_later(self.step, self._tick, due)

    def _tick(self, due: float) -> None:
        """Sends one event to each stream. If the process was held up, missed events are not sent in
        addition."""
        for visit in list(self.streams):
            visit.next_in_step()
        if self.streams:
            due = max(due + self.step, time.monotonic())
            asyncio.get_running_loop().call_later(max(0.0, due - time.monotonic()), self._tick, due)


class NullVisit(asyncio.Protocol):
    """A connection, which carries one request at a time."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._transport: asyncio.Transport | None = None
        self._asked = NullRequest()
        self._left = 0  # streamed events of this answer still to be sent

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._clock.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self._transport is not None:
                self._transport.abort()

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        came, body, self._body = time.monotonic(), self._body, b""
        try:
            asked = _read(body)
        except msgspec.DecodeError:
            self.write(_REFUSED)
        else:
            self.answer(asked, came)

    def answer(self, asked: NullRequest, came: float) -> None:
        """Answers a request that was read at the instant `came`."""
        if not self._clock.step:
            self.write(HEAD + EVENT * (asked.max_tokens - 1) + ending(asked))
            return
        self._asked, self._left = asked, asked.max_tokens
        self.write(HEAD)
        self._clock.add(self)

    def next_in_step(self) -> None:
        self._left -= 1
        if self._left:
            self.write(EVENT)
            return
        self._clock.streams.pop(self, None)
        self.write(ending(self._asked))

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def _serve(visit: Callable[[], NullVisit], port: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(visit, HOST, port, reuse_port=True, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    # wait until the process that started this one is gone
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


def run_process(visits: Callable[[str, str], Callable[[], NullVisit]]) -> int:
    """Runs one server process, at the port given on the command line. visits: takes the NullPlan as
    JSON and this process's number, and returns a function that makes connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    port, number = sys.argv[1:3]
    visit = visits(sys.stdin.readline(), number)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(visit, int(port)))
    return 0


def _visits(plan: str, number: str) -> Callable[[], NullVisit]:
    clock = StepClock(msgspec.json.decode(plan, type=NullPlan).step)
    return lambda: NullVisit(clock)


class NullServer:
    """Runs server processes while the context is open; `port` is their port. words: Python's
    command line arguments for a process."""

    def __init__(
        self,
        plan: msgspec.Struct,
        processes: int = 1,
        words: Sequence[str] = ("-m", "penstock.bench.null_server"),
    ) -> None:
        self._plan = plan
        self._count = processes
        self._words = words
        self._processes: list[subprocess.Popen[str]] = []
        self.port = 0

    def __enter__(self) -> NullServer:
        for number in range(self._count):
            command = [sys.executable, *self._words, str(self.port), str(number)]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self._processes.append(process)
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(msgspec.json.encode(self._plan).decode() + "\n")
            process.stdin.flush()
            told = process.stdout.readline().strip()
            if not told:
                self.__exit__()
                raise CapacityError(
                    f"the null server could not listen on {HOST}:{self.port}: is the port in use?"
                )
            self.port = int(told)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


if __name__ == "__main__":
    sys.exit(run_process(_visits))
