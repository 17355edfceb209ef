"""A server that computes nothing: `python -m penstock.bench.null_server`. Prebuilt events, at times known beforehand.

    calibrate    how many events and requests a client can hear         (step: all streams get an event at once, as an
                                                                         engine's step does)
    statistics   latencies drawn from a given distribution, stalls on demand, a queue of given length

It speaks OpenAI's completions, streamed or not, with a true usage. It knows no model and no load. Several processes
share the port by SO_REUSEPORT. Its timers are of whole milliseconds: a drawn time is kept to about 1 ms.
"""

from __future__ import annotations

import asyncio
import math
import random
import subprocess
import sys
import time
from collections import deque
from types import TracebackType
from typing import Any, Literal, cast

import httptools
import msgspec
import uvloop

from penstock.errors import CapacityError

BLOCK = 64  # events of one write where there is no gap between them


class Draw(msgspec.Struct, frozen=True):
    """Seconds. fixed: a. exponential: of mean a. lognormal: of median a, sigma b. uniform: from a to b."""

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


class Plan(msgspec.Struct):
    """first, gap: before the first event and between events. step: seconds between two events of every stream, all
    streams at the same instants (0: each by its own gap). stall_every, stall_for: nothing goes out in the last
    stall_for seconds of every stall_every since `zero`. slots: requests that are served at once, others queue (0: no
    bound). tokens: of an answer whose body asks for none."""

    first: Draw = Draw()
    gap: Draw = Draw()
    step: float = 0.0
    stall_every: float = 0.0
    stall_for: float = 0.0
    slots: int = 0
    tokens: int = 16
    cached: int = 0
    seed: int = 0
    zero: float = 0.0
    host: str = "127.0.0.1"
    port: int = 0

    def released(self, due: float) -> float:
        """The instant at which what is due goes out: the end of the stall that it falls in, if it does."""
        if not self.stall_every:
            return due
        phase = (due - self.zero) % self.stall_every
        return due + self.stall_every - phase if phase >= self.stall_every - self.stall_for else due


class Asked(msgspec.Struct):
    """What is read of a body."""

    prompt: str | list[int] = ""
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False


_asked = msgspec.json.Decoder(Asked).decode
_TOP = b'{"id":"cmpl-3f2b8a7c6d5e4f3a2b1c0d9e8f7a6b5c","object":"text_completion","created":1763680000,"model":"null",'
_LINE = (
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":%b,"stop_reason":null}],"usage":null}\n\n'
)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENT = _chunk(b"data: " + _TOP + _LINE % b"null")
LAST = _chunk(b"data: " + _TOP + _LINE % b'"length"')
STREAM_HEAD = _HEAD % (b"text/event-stream; charset=utf-8", b"transfer-encoding: chunked")


def _usage(asked: Asked, tokens: int, cached: int) -> bytes:
    prompt = len(asked.prompt.split()) if isinstance(asked.prompt, str) else len(asked.prompt)
    details = b',"prompt_tokens_details":{"cached_tokens":%d}' % cached
    return b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d%b}' % (
        prompt, tokens, prompt + tokens, details,
    )  # fmt: skip


class House:
    """What connections of a process share: the plan, chance, the queue of those that wait for a slot, the streams that
    go in step."""

    def __init__(self, plan: Plan, salt: int) -> None:
        self.plan = plan
        self.chance = random.Random(f"{plan.seed}/{salt}")
        self.waiting: deque[Visit] = deque()
        self.served = 0
        self.in_step: dict[Visit, None] = {}

    def enter(self, visit: Visit) -> None:
        if self.plan.slots and self.served >= self.plan.slots:
            self.waiting.append(visit)
            return
        self.served += 1
        visit.begin(time.monotonic())

    def leave(self) -> None:
        self.served -= 1
        if self.waiting:
            self.served += 1
            self.waiting.popleft().begin(time.monotonic())

    def tick(self, due: float) -> None:
        """One event for each stream that goes in step."""
        for visit in list(self.in_step):
            visit.next_in_step()
        loop = asyncio.get_running_loop()
        due = max(due + self.plan.step, time.monotonic())  # what it cannot keep up with is not caught up
        loop.call_later(max(0.0, due - time.monotonic()), self.tick, due)


class Visit(asyncio.Protocol):
    """A connection, and the one request at a time that it carries."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._transport: asyncio.Transport | None = None
        self._asked = Asked()
        self._left = 0  # events that are still to go out
        self._due = 0.0
        self._free = asyncio.Event()
        self._free.set()
        self._inside = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._house.in_step.pop(self, None)
        if self in self._house.waiting:
            self._house.waiting.remove(self)
        elif self._inside:
            self._inside = False
            self._house.leave()

    def pause_writing(self) -> None:
        self._free.clear()

    def resume_writing(self) -> None:
        self._free.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self._transport is not None:
                self._transport.abort()

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        body, self._body = self._body, b""
        try:
            self._asked = _asked(body)
        except msgspec.DecodeError:
            self._write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
            return
        self._house.enter(self)

    # -- an answer

    def begin(self, now: float) -> None:
        self._inside = True
        plan, loop = self._house.plan, asyncio.get_running_loop()
        asked = self._asked
        tokens = plan.tokens if asked.max_tokens is None else asked.max_tokens
        self._left = tokens * asked.n
        self._due = now + plan.first.one(self._house.chance)
        if not asked.stream:
            self._due += sum(plan.gap.one(self._house.chance) for _ in range(tokens - 1))
        elif plan.step and not plan.first.a:
            self._write(STREAM_HEAD)
            self._house.in_step[self] = None
            return
        self._at(loop, self._whole if not asked.stream else self._opening)

    def _at(self, loop: asyncio.AbstractEventLoop, what: Any) -> None:
        """Calls `what` when it is due, or when the stall that this falls in is over."""
        self._due = self._house.plan.released(self._due)
        wait = self._due - time.monotonic()
        if wait > 0.0005:
            loop.call_later(wait, what)
        else:
            loop.call_soon(what)

    def _opening(self) -> None:
        self._write(STREAM_HEAD)
        if self._house.plan.step:
            self._house.in_step[self] = None
            self.next_in_step()
        else:
            self._going_on()

    def _going_on(self) -> None:
        """The events that are due now, then the next at its time."""
        if self._transport is None:
            return
        plan, loop = self._house.plan, asyncio.get_running_loop()
        if plan.gap.kind == "fixed" and not plan.gap.a:
            if not self._free.is_set():
                loop.call_later(0.001, self._going_on)
                return
            count = min(BLOCK, self._left - 1)
            self._write(EVENT * count)
            self._left -= count
            if self._left > 1:
                loop.call_soon(self._going_on)
                return
        if self._left <= 1:
            self._close_stream()
            return
        self._write(EVENT)
        self._left -= 1
        self._due += plan.gap.one(self._house.chance)
        self._at(loop, self._going_on)

    def next_in_step(self) -> None:
        if self._left > 1:
            self._left -= 1
            self._write(EVENT)
            return
        self._house.in_step.pop(self, None)
        self._close_stream()

    def _close_stream(self) -> None:
        asked, plan = self._asked, self._house.plan
        tokens = (plan.tokens if asked.max_tokens is None else asked.max_tokens) * asked.n
        usage = b"data: " + _TOP + b'"choices":[],' + _usage(asked, tokens, plan.cached) + b"}\n\n"
        self._write(LAST + _chunk(usage) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        self._out()

    def _whole(self) -> None:
        choice = b'{"index":0,"text":"%b","logprobs":null,"finish_reason":"length"}' % (b" word" * self._left)
        body = _TOP + b'"choices":[' + choice + b"]," + _usage(self._asked, self._left, self._house.plan.cached) + b"}"
        self._write(_HEAD % (b"application/json", b"content-length: %d" % len(body)) + body)
        self._out()

    def _out(self) -> None:
        if self._inside:
            self._inside = False
            self._house.leave()

    def _write(self, data: bytes) -> None:
        if self._transport is not None and data:
            self._transport.write(data)


# --- processes


async def _serve(plan: Plan, salt: int) -> None:
    loop = asyncio.get_running_loop()
    house = House(plan, salt)
    server = await loop.create_server(lambda: Visit(house), plan.host, plan.port, reuse_port=True, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    if plan.step:
        house.tick(time.monotonic())
    await loop.run_in_executor(None, sys.stdin.read)  # until whoever started it goes away
    server.close()


def main() -> int:
    salt, line = sys.argv[1], sys.stdin.readline()
    plan = msgspec.json.decode(line, type=Plan)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(plan, int(salt)))
    return 0


class NullServer:
    """Processes that serve a plan while the context is open; `port` and `zero` are theirs."""

    def __init__(self, plan: Plan, processes: int = 1) -> None:
        self._plan = plan
        self._count = processes
        self._processes: list[subprocess.Popen[str]] = []
        self.port = 0
        self.zero = 0.0

    def __enter__(self) -> NullServer:
        self.zero = time.monotonic()
        for salt in range(self._count):
            plan = msgspec.structs.replace(self._plan, zero=self.zero, port=self.port or self._plan.port)
            command = [sys.executable, "-m", "penstock.bench.null_server", str(salt)]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            self._processes.append(process)
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(msgspec.json.encode(plan).decode() + "\n")
            process.stdin.flush()
            told = process.stdout.readline().strip()
            if not told:
                self.__exit__(None, None, None)
                raise CapacityError(f"the null server could not listen on {plan.host}:{plan.port}: is the port in use?")
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
