"""The pool of client processes. Starts them, sends each its share of the requests and the start
signal, and collects the results.

Knows processes and messages; not the content of results.
"""

from __future__ import annotations

import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, NamedTuple

from penstock.bench.worker_protocol import (
    Message,
    WorkerProgress,
    WorkerReady,
    WorkerResult,
    WorkerSpec,
    WorkerStart,
    WorkerStop,
    receive,
    send,
)
from penstock.children.spawn import command_of, how_ended, spawn
from penstock.errors import EngineError

LEAD = 0.05  # seconds from the start message to the instant at which the load level begins
# seconds for a client process to start, or to return its result after the load level
PATIENCE = 60.0
COUNTS = [name for name in WorkerProgress.__struct_fields__ if name != "firsts"]


class LoadProgress(WorkerProgress):
    """Progress of all processes together, `seconds` after the load level began. firsts: first-token
    times of requests that ended since the last progress. asked: number of requests of the whole
    load."""

    seconds: float = 0.0
    asked: int = 0


Hear = Callable[[LoadProgress], bool | None]  # a callback; if it returns True, the load level ends


class WorkerProcess(NamedTuple):
    process: subprocess.Popen[bytes]
    channel: socket.socket
    errors: IO[bytes]


class WorkerPool:
    """Client processes that run one load after another; leaving the context ends them. begin: the
    instant at which the last load began."""

    def __init__(self) -> None:
        self.begin = 0.0
        self._all: list[WorkerProcess] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        for process, channel, errors in self._all:
            process.kill()  # no effect on the result, which the process has already returned
            process.wait()
            channel.close()
            errors.close()
        self._all = []

    def run(self, specs: list[WorkerSpec], hear: Hear | None) -> list[WorkerResult]:
        """Runs a load on as many processes as there are specs, and returns all results. Raises
        EngineError when a process ends by itself."""
        while len(self._all) < len(specs):
            self._all.append(start_worker())
        workers = self._all[: len(specs)]
        for worker, spec in zip(workers, specs, strict=True):
            _tell(worker, spec)
        waiting = list(workers)
        while waiting:
            worker, message = _next(waiting, PATIENCE)
            if not isinstance(message, WorkerReady):
                raise EngineError(
                    f"a client process said {type(message).__name__} before it was ready"
                )
            waiting.remove(worker)
        self.begin = time.monotonic() + LEAD
        for worker in workers:
            _tell(worker, WorkerStart(self.begin))
        return self._gather(workers, specs, hear)

    def _gather(
        self, workers: list[WorkerProcess], specs: list[WorkerSpec], hear: Hear | None
    ) -> list[WorkerResult]:
        parts: dict[WorkerProcess, WorkerResult] = {}
        news: dict[WorkerProcess, WorkerProgress] = {}
        stopped = enough = False
        until, asked = (
            self.begin + specs[0].load.stop_after + PATIENCE,
            sum(len(spec.load.asks) for spec in specs),
        )
        while working := [worker for worker in workers if worker not in parts]:
            worker, message = _next(working, until - time.monotonic())
            seconds = time.monotonic() - self.begin
            if isinstance(message, WorkerResult):
                parts[worker] = message
            elif isinstance(message, WorkerProgress):
                news[worker] = message
                counts = {
                    name: sum(getattr(each, name) for each in news.values()) for name in COUNTS
                }
                now = LoadProgress(**counts, firsts=message.firsts, seconds=seconds, asked=asked)
                enough = (hear is not None and hear(now)) or enough
            # True once the window is over and none of its requests is running
            done = seconds >= specs[0].load.window[1] and all(
                each in parts or (each in news and not news[each].waiting) for each in workers
            )
            if not stopped and (enough or done):
                stopped = True
                for each in working:
                    _tell(each, WorkerStop())
        return [parts[worker] for worker in workers]


def _tell(worker: WorkerProcess, message: Message) -> None:
    # if the process has ended, `_next` reports that
    with suppress(BrokenPipeError, ConnectionResetError):
        send(worker.channel, message)


def _next(waiting: list[WorkerProcess], patience: float) -> tuple[WorkerProcess, Message]:
    """Returns the next message of any of these processes."""
    poll = select.poll()
    for each in waiting:
        poll.register(each.channel, select.POLLIN)
    ready = poll.poll(max(0.0, patience) * 1e3)
    if not ready:
        raise EngineError("a client process of the load did not come back: try again with fewer")
    worker = next(worker for worker in waiting if worker.channel.fileno() == ready[0][0])
    if (message := receive(worker.channel)) is not None:
        return worker, message
    code = worker.process.wait()
    worker.errors.seek(0)
    lines = worker.errors.read().decode(errors="replace").strip().splitlines() or [
        "it said nothing"
    ]
    raise EngineError(f"a client process of the load {how_ended(code)}: {lines[-1][:300]}")


def start_worker() -> WorkerProcess:
    """Starts a worker in its own session, so that an interrupt at the terminal goes to the load
    alone."""
    ours, theirs = socket.socketpair()
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
    with theirs:
        process = spawn(
            command_of("penstock.bench.load_worker", theirs.fileno()),
            "a client process of the load",
            fds=(theirs.fileno(),),
            stdout=errors,
            stderr=errors,
            session=True,
        )
    return WorkerProcess(process, ours, errors)
