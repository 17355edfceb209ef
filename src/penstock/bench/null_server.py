"""A server that computes nothing: `python -m penstock.bench.null_server`. Prebuilt events, at times known beforehand.

    calibrate    how many events and requests a client can hear         (step: all streams get an event at once, as an
                                                                         engine's step does)
    statistics   latencies drawn from a given distribution, stalls on demand, queues whose waits theory knows; and
                 what it did when, for whoever wants to know what a client should have heard

It speaks OpenAI's completions, streamed or not, with a true usage. It knows no model and no load. What it does is told
by a plan (null_plan.py). Several processes share the port by SO_REUSEPORT. Its timers are of whole milliseconds: a
drawn time is kept to about 1 ms.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import subprocess
import sys
import time
from array import array
from collections import deque
from types import TracebackType
from typing import Any, cast

import httptools
import msgspec
import uvloop

from penstock.bench.null_answer import EVENT, REFUSED, STREAM_HEAD, NullRequest, ending, read, whole
from penstock.bench.null_plan import NullPlan, Stamp
from penstock.errors import CapacityError

BLOCK = 64  # events of one write where there is no gap between them


class House:
    """What connections of a process share: the plan, chance, the queues, the streams that go in step, the one stall."""

    def __init__(self, plan: NullPlan, salt: int) -> None:
        self.plan = plan
        self.chance = random.Random(f"{plan.seed}/{salt}")
        self.waiting: deque[Visit] = deque()
        self.served = 0
        self.in_step: dict[Visit, None] = {}
        self.stamps = os.open(plan.stamps, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if plan.stamps else None
        self._came = 0
        self._still = (0.0, 0.0)  # the stall of `stall_at`
        self._free = [0.0] * plan.lanes  # when each lane is

    def enter(self, visit: Visit) -> None:
        self._came += 1
        if self._came == self.plan.stall_at:
            self._still = (visit.came, visit.came + self.plan.stall_for)
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

    def due(self, asked: NullRequest, now: float) -> float:
        """When a request that is taken up now has its first event. A lane's times follow from each other (Lindley's
        recursion), so that a late timer delays one request and not all behind it."""
        takes = self.plan.first.one(self.chance)
        if not self._free:
            return now + takes
        lane = asked.lane(len(self._free))
        self._free[lane] = max(now, self._free[lane]) + takes
        return self._free[lane]

    def released(self, due: float) -> float:
        begin, end = self._still
        return self.plan.released(end if begin <= due < end else due)

    def tick(self, due: float) -> None:
        """One event for each stream that goes in step."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        if self.plan.stall_for and (later := self.released(now)) > now:
            loop.call_later(later - now, self.tick, later)
            return
        for visit in list(self.in_step):
            visit.next_in_step()
        due = max(due + self.plan.step, time.monotonic())  # what it cannot keep up with is not caught up
        loop.call_later(max(0.0, due - time.monotonic()), self.tick, due)


class Visit(asyncio.Protocol):
    """A connection, and the one request at a time that it carries."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._transport: asyncio.Transport | None = None
        self._asked = NullRequest()
        self._left = 0  # events that are still to go out
        self._due = 0.0
        self._first_due = 0.0
        self._written = array("d")  # where stamps are wanted
        self._free = asyncio.Event()
        self._free.set()
        self._inside = False
        self.came = 0.0

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
            self._asked = read(body)
        except msgspec.DecodeError:
            self._write(REFUSED)
            return
        self.came = time.monotonic()
        self._house.enter(self)

    # -- an answer

    def begin(self, now: float) -> None:
        self._inside = True
        plan, asked = self._house.plan, self._asked
        tokens = self._tokens()
        self._left = tokens * asked.n
        self._due = self._house.due(asked, now)
        del self._written[:]
        if not asked.stream:
            self._due += sum(plan.gap.one(self._house.chance) for _ in range(tokens - 1))
        elif plan.step and not plan.first.a:
            self._first_due = self._due
            self._write(STREAM_HEAD)
            self._house.in_step[self] = None
            return
        self._at(self._whole if not asked.stream else self._opening)
        self._first_due = self._due

    def _tokens(self) -> int:
        """Of each sample."""
        return self._house.plan.tokens if self._asked.max_tokens is None else self._asked.max_tokens

    def _at(self, what: Any) -> None:
        """Calls `what` when it is due, or when the stall that this falls in is over."""
        loop = asyncio.get_running_loop()
        self._due = self._house.released(self._due)
        wait = self._due - time.monotonic()
        if wait > 0.0005:
            loop.call_later(wait, self._unless_stalled, what)
        else:
            loop.call_soon(what)

    def _unless_stalled(self, what: Any) -> None:
        """A stall may have begun while it waited."""
        if self._house.plan.stall_for and self._house.released(now := time.monotonic()) > now:
            self._due = max(self._due, now)
            self._at(what)
        else:
            what()

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
            self._events(min(BLOCK, self._left - 1))
            if self._left > 1:
                loop.call_soon(self._going_on)
                return
        if self._left <= 1:
            self._close_stream()
            return
        self._events(1)
        self._due += plan.gap.one(self._house.chance)
        self._at(self._going_on)

    def next_in_step(self) -> None:
        if self._left > 1:
            self._events(1)
            return
        self._house.in_step.pop(self, None)
        self._close_stream()

    def _events(self, count: int) -> None:
        """So many of those that are left; not the last."""
        self._stamp(count)
        self._left -= count
        self._write(EVENT if count == 1 else EVENT * count)

    def _stamp(self, count: int) -> None:
        """Before a write, for the client may hear it before the call comes back."""
        if self._house.stamps is not None:
            self._written.extend([time.monotonic()] * count)

    def _close_stream(self) -> None:
        self._stamp(1)
        self._write(ending(self._asked, self._tokens() * self._asked.n, self._house.plan.cached))
        self._out()

    def _whole(self) -> None:
        self._stamp(1)
        self._write(whole(self._asked, self._left, self._house.plan.cached))
        self._out()

    def _out(self) -> None:
        if self._house.stamps is not None:
            os.write(self._house.stamps, Stamp(self.came, self._first_due, self._written).packed())
        if self._inside:
            self._inside = False
            self._house.leave()

    def _write(self, data: bytes) -> None:
        if self._transport is not None and data:
            self._transport.write(data)


# --- processes


async def _serve(plan: NullPlan, salt: int) -> None:
    loop = asyncio.get_running_loop()
    house = House(plan, salt)
    server = await loop.create_server(lambda: Visit(house), plan.host, plan.port, reuse_port=True, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    if plan.step:
        house.tick(time.monotonic())
    await loop.run_in_executor(None, sys.stdin.read)  # until whoever started it goes away
    server.close()


def main() -> int:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    salt, line = sys.argv[1], sys.stdin.readline()
    plan = msgspec.json.decode(line, type=NullPlan)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(plan, int(salt)))
    return 0


class NullServer:
    """Processes that serve a plan while the context is open; `port` and `zero` are theirs."""

    def __init__(self, plan: NullPlan, processes: int = 1) -> None:
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
