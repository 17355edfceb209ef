"""A server that computes nothing: `python -m penstock.bench.null_server`. Prebuilt events, at times known beforehand.

    calibrate     how many events and requests a client can hear (`step`: all streams get an event at once, as an
                  engine's step does)
    statistics    latencies drawn from a given distribution, one stall, queues whose waits theory knows; and a file of
                  what it did when, to hold beside what a client heard

It speaks OpenAI's completions, streamed, with a true usage. Several processes share the port by SO_REUSEPORT. Its
timers are of whole milliseconds: a drawn time is kept to about 1 ms. It knows no model and no load.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import resource
import struct
import subprocess
import sys
import time
from array import array
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, cast

import httptools
import msgspec
import uvloop

from penstock.errors import CapacityError

HOST = "127.0.0.1"
_STAMP = struct.Struct("<ddq")  # came, due, and how many instants follow


class Draw(msgspec.Struct, frozen=True):
    """A time in seconds. fixed: a. exponential: of mean a. lognormal: of median a, sigma b. uniform: from a to b."""

    kind: Literal["fixed", "exponential", "lognormal", "uniform"] = "fixed"
    a: float = 0.0
    b: float = 0.0

    def one(self, chance: random.Random) -> float:
        if self.kind == "fixed":
            return self.a
        if self.kind == "exponential":
            return chance.expovariate(1.0 / self.a)
        if self.kind == "uniform":
            return chance.uniform(self.a, self.b)
        return self.a * math.exp(self.b * chance.gauss(0.0, 1.0))


class NullPlan(msgspec.Struct):
    """first, gap: seconds before the first event and between events. step: seconds between two events of every stream,
    all streams at the same instants (0: each by its own gap). stall_at: nothing goes out for stall_for seconds, once,
    from the moment that this many requests have come to a process. lanes: so many queues of one server each; the
    prompt's first id modulo lanes tells which, and `first` is how long a request holds it up (0: none). stamps: a file
    that gets a Stamp for each answer."""

    first: Draw = Draw()
    gap: Draw = Draw()
    step: float = 0.0
    stall_at: int = 0
    stall_for: float = 0.0
    lanes: int = 0
    seed: int = 0
    stamps: str = ""


class Stamp(NamedTuple):
    """One answer, by the server's own clock, which is the client's: time.monotonic(). came: its request had been read.
    due: its first event, by the plan. written: each event, when it was handed to the socket."""

    came: float
    due: float
    written: array[float]


def read_stamps(path: Path) -> list[Stamp]:
    """Returns what the processes of a plan have written, in the order in which answers were complete."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        came, due, count = _STAMP.unpack_from(data, at)
        at += _STAMP.size
        found.append(Stamp(came, due, array("d", data[at : at + 8 * count])))
        at += 8 * count
    return found


# --- what it says


class NullRequest(msgspec.Struct):
    """What is read of a body."""

    prompt: str | list[int] = ""
    max_tokens: int = 16


_read = msgspec.json.Decoder(NullRequest).decode  # raises msgspec.DecodeError
_TOP = b'data: {"id":"cmpl-3f2b8a7c6d5e4f3a2b1c0d9e8f7a6b5c","object":"text_completion","created":1763680000,'
_CHOICE = _TOP + (
    b'"model":"null","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":%b,"stop_reason":null}],'
    b'"usage":null}\n\n'
)
_USAGE = _TOP + (
    b'"model":"null","choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
    b'"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_EVENT, _LAST, _DONE = _chunk(_CHOICE % b"null"), _chunk(_CHOICE % b'"length"'), _chunk(b"data: [DONE]\n\n")
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_REFUSED = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n"


def _ending(asked: NullRequest) -> bytes:
    """Returns the last event of a stream, its usage, [DONE]."""
    prompt = len(asked.prompt.split()) if isinstance(asked.prompt, str) else len(asked.prompt)
    usage = _USAGE % (prompt, asked.max_tokens, prompt + asked.max_tokens)
    return _LAST + _chunk(usage) + _DONE + b"0\r\n\r\n"


# --- a process


class _Timing:
    """What the connections of a process share: the plan, chance, the queues, the streams in step, the one stall."""

    def __init__(self, plan: NullPlan, salt: int) -> None:
        self.plan = plan
        self.chance = random.Random(f"{plan.seed}/{salt}")
        self.in_step: dict[_Visit, None] = {}
        self.stamps = os.open(plan.stamps, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if plan.stamps else None
        self.at_once = plan == NullPlan(seed=plan.seed)
        self._came = 0
        self._stall = (0.0, 0.0)
        self._free = [0.0] * plan.lanes  # when each lane is

    def due(self, asked: NullRequest, now: float) -> float:
        """Returns when a request that comes now has its first event. A lane's times follow from each other (Lindley's
        recursion), so that a late timer delays one request and not all behind it."""
        self._came += 1
        if self._came == self.plan.stall_at:
            self._stall = (now, now + self.plan.stall_for)
        takes = self.plan.first.one(self.chance)
        if not self._free:
            return now + takes
        lane = asked.prompt[0] % len(self._free) if isinstance(asked.prompt, list) and asked.prompt else 0
        self._free[lane] = max(now, self._free[lane]) + takes
        return self._free[lane]

    async def until(self, due: float) -> float:
        """Waits until what is due may go out; returns when that was to be: then, or when the stall ends."""
        while True:
            begin, end = self._stall  # one may have begun in the meantime
            due = max(due, end) if begin <= max(due, time.monotonic()) < end else due
            wait = due - time.monotonic()
            if wait <= 0.0005:
                return due
            await asyncio.sleep(wait)

    def tick(self, due: float) -> None:
        """Sends one event to each stream that goes in step; what it cannot keep up with is not caught up."""
        for visit in list(self.in_step):
            visit.next_in_step()
        due = max(due + self.plan.step, time.monotonic())
        asyncio.get_running_loop().call_later(max(0.0, due - time.monotonic()), self.tick, due)


class _Visit(asyncio.Protocol):
    """A connection, and the one request at a time that it carries."""

    def __init__(self, timing: _Timing) -> None:
        self._timing = timing
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._transport: asyncio.Transport | None = None
        self._asked = NullRequest()
        self._left = 0  # events in step that are still to go out
        self._speaks: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._timing.in_step.pop(self, None)
        if self._speaks is not None:
            self._speaks.cancel()

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
            self._asked = _read(body)
        except msgspec.DecodeError:
            self._write(_REFUSED)
            return
        if self._timing.plan.step:
            self._left = self._asked.max_tokens
            self._write(_HEAD)
            self._timing.in_step[self] = None
        elif self._timing.at_once:
            self._write(_HEAD + _EVENT * (self._asked.max_tokens - 1) + _ending(self._asked))
        else:
            due = self._timing.due(self._asked, came)
            self._speaks = asyncio.get_running_loop().create_task(self._speak(came, due))

    def next_in_step(self) -> None:
        self._left -= 1
        if self._left:
            self._write(_EVENT)
            return
        self._timing.in_step.pop(self, None)
        self._write(_ending(self._asked))

    async def _speak(self, came: float, due: float) -> None:
        """Sends each event when it is due; stamps it before, for the client may hear it before the write returns."""
        first, written, timing = due, array("d"), self._timing
        for left in reversed(range(self._asked.max_tokens)):
            due = await timing.until(due)
            if not written:
                first = due
                self._write(_HEAD)
            written.append(time.monotonic())
            if left:
                self._write(_EVENT)
                due += timing.plan.gap.one(timing.chance)
            elif timing.stamps is not None:
                os.write(timing.stamps, _STAMP.pack(came, first, len(written)) + written.tobytes())
        self._write(_ending(self._asked))

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def _serve(plan: NullPlan, port: int, salt: int) -> None:
    loop = asyncio.get_running_loop()
    timing = _Timing(plan, salt)
    server = await loop.create_server(lambda: _Visit(timing), HOST, port, reuse_port=True, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    if plan.step:
        timing.tick(time.monotonic())
    await loop.run_in_executor(None, sys.stdin.read)  # until whoever started it goes away
    server.close()


def main() -> int:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    port, salt = map(int, sys.argv[1:3])
    plan = msgspec.json.decode(sys.stdin.readline(), type=NullPlan)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(plan, port, salt))
    return 0


class NullServer:
    """Runs processes that serve a plan while the context is open; `port` is theirs."""

    def __init__(self, plan: NullPlan, processes: int = 1) -> None:
        self._plan = plan
        self._count = processes
        self._processes: list[subprocess.Popen[str]] = []
        self.port = 0

    def __enter__(self) -> NullServer:
        for salt in range(self._count):
            command = [sys.executable, "-m", "penstock.bench.null_server", str(self.port), str(salt)]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            self._processes.append(process)
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(msgspec.json.encode(self._plan).decode() + "\n")
            process.stdin.flush()
            told = process.stdout.readline().strip()
            if not told:
                self.__exit__(None, None, None)
                raise CapacityError(f"the null server could not listen on {HOST}:{self.port}: is the port in use?")
            self.port = int(told)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


if __name__ == "__main__":
    sys.exit(main())
