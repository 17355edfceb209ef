"""The client processes of a point: started, told their specs and the word, heard until all have brought their columns.

It knows processes and messages; not what is in the columns.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
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
from penstock.errors import EngineError

LEAD = 0.05  # seconds between the word and the point's begin
PATIENCE = 60.0  # seconds for a client process to start, or to come back after the point

# Gets the seconds since the begin, the latest news of each process, the fresh first-token times; True ends the point.
Hear = Callable[[float, list[WorkerProgress], list[float]], bool | None]


class Worker(NamedTuple):
    process: subprocess.Popen[bytes]
    pipe: Connection
    errors: IO[bytes]


class WorkerPool:
    """The client processes of a point; `end` them whatever happens."""

    def __init__(self, specs: list[WorkerSpec]) -> None:
        self.begin = 0.0
        self._specs = specs
        self._workers = [start_worker() for _ in specs]

    def run(self, hear: Hear) -> list[WorkerResult]:
        """Returns all parts. Raises EngineError when a process ends by itself."""
        for worker, spec in zip(self._workers, self._specs, strict=True):
            _tell(worker, spec)
        waiting = list(self._workers)
        while waiting:
            worker, message = _next(waiting, PATIENCE)
            if not isinstance(message, WorkerReady):
                raise EngineError(f"a client process said {type(message).__name__} before it was ready")
            waiting.remove(worker)
        self.begin = time.monotonic() + LEAD
        for worker in self._workers:
            _tell(worker, WorkerStart(self.begin))
        return self._gather(hear)

    def _gather(self, hear: Hear) -> list[WorkerResult]:
        parts: dict[Worker, WorkerResult] = {}
        news: dict[Worker, WorkerProgress] = {}
        stopped = enough = False
        until = self.begin + self._specs[0].stop_after + PATIENCE
        while working := [worker for worker in self._workers if worker not in parts]:
            worker, message = _next(working, until - time.monotonic())
            if isinstance(message, WorkerResult):
                parts[worker] = message
            elif isinstance(message, WorkerProgress):
                news[worker] = message
                enough = hear(time.monotonic() - self.begin, list(news.values()), message.firsts) or enough
            if not stopped and (enough or self._has_all(news, parts)):
                stopped = True
                for each in working:
                    _tell(each, WorkerStop())
        return [parts[worker] for worker in self._workers]

    def _has_all(self, news: dict[Worker, WorkerProgress], parts: dict[Worker, WorkerResult]) -> bool:
        """Returns whether the window is over and nothing of it goes on, in any process."""
        if time.monotonic() - self.begin < self._specs[0].window[1]:
            return False
        return all(each in parts or (each in news and not news[each].waiting) for each in self._workers)

    def end(self) -> None:
        for process, pipe, errors in self._workers:
            process.kill()  # one that has brought its part has nothing left to do
            process.wait()
            pipe.close()
            errors.close()


def _tell(worker: Worker, message: Message) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # it has ended: `_next` tells what it said last
        send(worker.pipe, message)


def _next(waiting: list[Worker], patience: float) -> tuple[Worker, Message]:
    """Returns the next message of one of these."""
    ready = wait([worker.pipe for worker in waiting], max(0.0, patience))
    if not ready:
        raise EngineError("a client process of the load did not come back: try again with fewer")
    worker = next(worker for worker in waiting if worker.pipe is ready[0])
    if (message := receive(worker.pipe)) is not None:
        return worker, message
    code = worker.process.wait()
    worker.errors.seek(0)
    lines = worker.errors.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
    raise EngineError(f"a client process of the load ended with code {code}: {lines[-1][:300]}")


def start_worker() -> Worker:
    """Starts a worker in a session of its own: an interrupt at the terminal is the load's to handle."""
    ours, theirs = Pipe()
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
    with theirs:
        command = [sys.executable, "-m", "penstock.bench.load_worker", str(theirs.fileno())]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, pass_fds=[theirs.fileno()],
            start_new_session=True,
        )  # fmt: skip
    return Worker(process, ours, errors)
