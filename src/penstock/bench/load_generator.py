"""Sends a client process's share of the requests. In an open loop each request has its own time,
and there are as many connections as needed. A closed loop has a fixed number of slots; a slot sends
its next request when its last one has ended. Measures its own lag, lateness and CPU time. Knows
when and what to send; no figures, and not the process around it (load_worker.py).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.bench.client_connection import ClientConnection, SentRequest
from penstock.bench.worker_protocol import WorkerProgress, WorkerSpec

SLICE = 0.001  # most seconds of sending before arrived bytes are read
TICK = 0.005
NEWS = 0.25
OPENING = 10.0  # most seconds for opening connections before the load begins
AT_ONCE = 64  # connections opened concurrently: a listener's queue is often 128 long
# seconds after which an idle connection is not reused: some servers close theirs after 5 s
IDLE = 2.0
FIRSTS = 200


class LoadGenerator:
    """Sends one client process's share of a load level's requests."""

    def __init__(self, spec: WorkerSpec, tell: Callable[[WorkerProgress], None]) -> None:
        self._target, self._load, self._connections = spec.target, spec.load, spec.connections
        self._head, self._tell_load = spec.target.head(), tell
        self.posts = [
            SentRequest(*row, row[1].intended)
            for row in zip(spec.number, spec.load.asks, strict=True)
        ]
        planned = (
            len(self.posts) if spec.load.closed is None else min(spec.load.closed, len(self.posts))
        )
        self._planned = deque(self.posts[:planned])  # requests that are sent at their planned time
        # requests sent when a slot is free (closed loop)
        self._waiting = deque(self.posts[planned:])
        # (instant since which it is idle, connection), the most recent last
        self._idle: list[tuple[float, ClientConnection]] = []
        self._flying: set[SentRequest] = set()
        self._addresses: list[tuple[str, int]] = []
        self._unreachable = ""
        self._tls: ssl.SSLContext | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._done = asyncio.Event()
        self._so_far = WorkerProgress()
        self._events = 0  # streamed events of requests that have ended
        self._tick = 0.0
        self.begin = 0.0
        self.late = array("f")
        self.lags = array("f")
        self.cpu = self.wall = 0.0
        self.fault: BaseException | None = None

    # -- opening connections before the load

    async def open(self) -> None:
        """Resolves the host and opens connections in advance. An unreachable server raises nothing
        here: its requests will be counted as refused."""
        target, loop = self._target, asyncio.get_running_loop()
        if target.tls:
            self._tls = ssl.create_default_context()
        try:
            found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        except OSError as error:
            self._unreachable = f"{target.host} is no host that is known ({error})"
            return
        self._addresses = [(str(address[0]), int(address[1])) for *_, address in found]
        until = time.monotonic() + OPENING
        while (lacking := self._connections - len(self._idle)) > 0 and time.monotonic() < until:
            opening = [self._connect() for _ in range(min(AT_ONCE, lacking))]
            opened = await asyncio.gather(*opening, return_exceptions=True)
            for each in opened:
                if isinstance(each, ClientConnection):
                    self._keep(each, time.monotonic())
            if not any(isinstance(each, ClientConnection) for each in opened):
                break

    async def _connect(self) -> ClientConnection:
        """Opens a connection, trying each address of the host. Raises OSError (TimeoutError
        included) with the reason at the last address."""
        last: OSError = ConnectionError(self._unreachable or "no address")
        loop = asyncio.get_running_loop()
        for at, (host, port) in enumerate(self._addresses):
            name = self._target.host if self._tls else None
            try:
                async with asyncio.timeout(min(self._load.stall, OPENING)):
                    _, connection = await loop.create_connection(
                        lambda: ClientConnection(self._head, self.ended),
                        host,
                        port,
                        ssl=self._tls,
                        server_hostname=name,
                    )
            except OSError as error:
                last = error
                continue
            if at:  # try the address that answered first from now on
                self._addresses.insert(0, self._addresses.pop(at))
            return connection
        raise last

    # -- sending a load level's requests

    async def run(self, begin: float) -> None:
        """Sends all requests from the instant `begin` on. Returns when all have ended, the time is
        over, or `stop` is called."""
        self.begin = begin
        loop = asyncio.get_running_loop()
        for post in self._planned:
            post.intended = begin + (0.0 if self._load.closed else post.intended)
            post.window = self._in_window(post.intended)
        await asyncio.sleep(max(0.0, begin - time.monotonic()))
        started, cpu = time.monotonic(), time.process_time()
        timers = [loop.call_later(self._load.stop_after, self.stop)]
        self._tick = started + TICK
        loop.call_later(TICK, self._ticked)
        loop.call_soon(self._send_due)
        self._look_for_stalls()
        self._tell()
        await self._done.wait()
        self.cpu, self.wall = time.process_time() - cpu, time.monotonic() - started
        for timer in timers:
            timer.cancel()
        self._cut()
        self._tell()

    def stop(self) -> None:
        self._done.set()

    def crashed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handles exceptions of the loop's callbacks: they are faults of this code and end the
        process with a traceback."""
        self.fault = context.get("exception") or RuntimeError(str(context.get("message")))
        self._done.set()

    def _send_due(self) -> None:
        loop = asyncio.get_running_loop()
        now = time.monotonic()
        until = now + SLICE
        while self._planned and not self._done.is_set():
            wait = self._planned[0].intended - now
            if wait > 0:
                # Timers have millisecond resolution: wake half a millisecond early, then poll until
                # the request is due.
                loop.call_later(max(0.0, wait - 0.0005), self._send_due)
                return
            if now > until:
                loop.call_soon(self._send_due)
                return
            self._take_up(self._planned.popleft(), now)
            now = time.monotonic()

    def _take_up(self, post: SentRequest, now: float) -> None:
        post.taken = now
        self.late.append(now - post.intended)
        self._so_far.sent += 1
        self._flying.add(post)
        self._send(post)

    def _send(self, post: SentRequest) -> None:
        while self._idle:
            since, connection = self._idle.pop()
            if not connection.reusable:
                continue
            if connection.used and time.monotonic() - since > IDLE:
                connection.close()
                continue
            connection.send(post)
            return
        task = asyncio.get_running_loop().create_task(self._open_and_send(post))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open_and_send(self, post: SentRequest) -> None:
        try:
            connection = await self._connect()
        except OSError as error:
            if post.outcome is None:
                why = "it took too long" if isinstance(error, TimeoutError) else str(error)
                post.outcome, post.end = "refused", time.monotonic()
                post.message = f"no connection to {self._target.host}:{self._target.port}: {why}"
                self._settled(post)
            return
        if post.outcome is None:
            connection.send(post)
        else:
            connection.close()

    # -- callbacks of connections

    def ended(self, connection: ClientConnection, post: SentRequest) -> None:
        if post.outcome == "cut" and connection.was_raced(post):
            post.outcome, post.again, post.answer = None, True, None
            self._send(post)
            return
        if connection.reusable:
            self._keep(connection, post.end)
        else:
            connection.close()
        self._settled(post)

    def _keep(self, connection: ClientConnection, since: float) -> None:
        connection.kept = True
        self._idle.append((since, connection))

    def _settled(self, post: SentRequest) -> None:
        self._flying.discard(post)
        self._so_far.ended += 1
        self._so_far.unfinished += post.outcome == "unfinished"
        # requests that the client cut off are no failures
        self._so_far.failed += post.outcome not in (
            "ok",
            "unfinished",
        )
        answer = post.answer
        if answer is not None:
            self._events += len(answer.times)
            self._so_far.output_tokens += answer.usage.completion_tokens if answer.usage else 0
            if answer.times and len(self._so_far.firsts) < FIRSTS:
                self._so_far.firsts.append(answer.times[0] - post.intended)
        if self._waiting and not self._done.is_set():
            fresh = self._waiting.popleft()
            fresh.intended, fresh.window = post.end, self._in_window(post.end)
            self._take_up(fresh, time.monotonic())
        elif not self._planned and not self._flying:
            self._done.set()

    def _in_window(self, intended: float) -> bool:
        first, end = self._load.window
        return first <= intended - self.begin < end

    # -- timers of the event loop

    def _ticked(self) -> None:
        """Measures how late the event loop's ticks are. A long block skips ticks; the skipped ones
        are counted too."""
        now = time.monotonic()
        late = now - self._tick
        while late > 0.0:
            self.lags.append(late)
            late -= TICK
        if self._tick >= now:
            self.lags.append(0.0)
        self._tick = now + TICK
        if not self._done.is_set():
            asyncio.get_running_loop().call_later(TICK, self._ticked)

    def _look_for_stalls(self) -> None:
        oldest = time.monotonic() - self._load.stall
        for post in [post for post in self._flying if post.heard < oldest]:
            if post.connection is not None:
                post.connection.abandon("stalled", f"no byte for {self._load.stall:g} s")
        if not self._done.is_set():
            asyncio.get_running_loop().call_later(
                min(0.25, self._load.stall / 4), self._look_for_stalls
            )

    def _tell(self) -> None:
        so_far = self._so_far
        so_far.in_flight, so_far.waiting = len(self._flying), self._still_wanted()
        so_far.events = self._events + sum(
            len(post.answer.times) for post in self._flying if post.answer
        )
        self._tell_load(so_far)
        so_far.firsts = []
        if not self._done.is_set():
            asyncio.get_running_loop().call_later(NEWS, self._tell)

    def _still_wanted(self) -> int:
        """Returns the number of the window's requests that are still running or to come."""
        open_still = sum(post.window for post in self._flying) + sum(
            post.window for post in self._planned
        )
        first, end = self._load.window
        to_come = bool(self._waiting) and first < end and time.monotonic() - self.begin < end
        return open_still + to_come

    def _cut(self) -> None:
        """Ends the point: running requests count as unfinished, and connections are closed."""
        for post in list(self._flying):
            if post.connection is not None:
                post.connection.abandon("unfinished", "the point ended first")
            else:
                post.outcome, post.end, post.message = (
                    "unfinished",
                    time.monotonic(),
                    "the point ended first",
                )
                self._settled(post)
        for _, connection in self._idle:
            connection.close()
        for task in self._tasks:
            task.cancel()
