"""The client processes of a point: started, told their specs and the word, heard until all have brought their columns.

It knows processes and frames; not what is in the columns.
"""

from __future__ import annotations

import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, BinaryIO, cast

from penstock.bench.worker_protocol import (
    Message,
    WorkerProgress,
    WorkerReady,
    WorkerResult,
    WorkerSpec,
    WorkerStart,
    WorkerStop,
    pack,
    read,
)
from penstock.errors import EngineError

LEAD = 0.05  # seconds between the word and the point's begin
PATIENCE = 60.0  # seconds for a client process to start, or to come back after the point


class WorkerPool:
    """The client processes of a point; `end` them whatever happens."""

    def __init__(self, specs: list[WorkerSpec]) -> None:
        self.begin = 0.0
        self._specs = specs
        self._told: queue.SimpleQueue[tuple[int, Message | None]] = queue.SimpleQueue()
        self._errors: list[IO[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        for at in range(len(specs)):
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
            self._errors.append(errors)
            self._processes.append(_client(errors))
            self._threads.append(threading.Thread(target=self._hear, args=(at,), daemon=True))
            self._threads[-1].start()

    def run(self, hear: Callable[[float, list[WorkerProgress], list[float]], bool | None] | None) -> list[WorkerResult]:
        """Returns all parts. `hear` gets the seconds since the begin, the latest news of each process, the fresh
        first-token times; when it says True, the point ends. Raises EngineError when a process ends by itself."""
        for at, spec in enumerate(self._specs):
            self._tell(at, spec)
        for _ in self._specs:
            at, message = self._next(PATIENCE)
            if not isinstance(message, WorkerReady):
                raise EngineError(f"a client process said {type(message).__name__} before it was ready")
        self.begin = time.monotonic() + LEAD
        for at in range(len(self._specs)):
            self._tell(at, WorkerStart(self.begin))
        return self._gather(hear)

    def _gather(
        self, hear: Callable[[float, list[WorkerProgress], list[float]], bool | None] | None
    ) -> list[WorkerResult]:
        parts: dict[int, WorkerResult] = {}
        news: dict[int, WorkerProgress] = {}
        stopped = enough = False
        until = self.begin + self._specs[0].stop_after + PATIENCE
        while len(parts) < len(self._specs):
            at, message = self._next(until - time.monotonic())
            if isinstance(message, WorkerResult):
                parts[at] = message
            elif isinstance(message, WorkerProgress):
                news[at] = message
                if hear is not None:
                    enough = hear(time.monotonic() - self.begin, list(news.values()), message.firsts) or enough
            if not stopped and (enough or self._has_all(news, parts)):
                stopped = True
                for each in range(len(self._specs)):
                    if each not in parts:
                        self._tell(each, WorkerStop())
        return [parts[at] for at in range(len(self._specs))]

    def _has_all(self, news: dict[int, WorkerProgress], parts: dict[int, WorkerResult]) -> bool:
        """Returns whether the window is over and nothing of it goes on, in any process."""
        if time.monotonic() - self.begin < self._specs[0].window[1]:
            return False
        return all(at in parts or (at in news and not news[at].waiting) for at in range(len(self._specs)))

    def _next(self, patience: float) -> tuple[int, Message]:
        try:
            at, message = self._told.get(timeout=max(0.0, patience))
        except queue.Empty as error:
            raise EngineError("a client process of the load did not come back: try again with fewer") from error
        if message is None:
            code = self._processes[at].wait()
            self._errors[at].seek(0)
            lines = self._errors[at].read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise EngineError(f"a client process of the load ended with code {code}: {lines[-1][:300]}")
        return at, message

    def _hear(self, at: int) -> None:
        """Hears, in a thread a process, what it says, and None when it has ended before its part."""
        out = self._processes[at].stdout
        assert out is not None
        message: Message | None = None
        while not isinstance(message, WorkerResult):
            message = read(cast(BinaryIO, out))
            self._told.put((at, message))
            if message is None:
                return

    def _tell(self, at: int, message: Message) -> None:
        pipe = self._processes[at].stdin
        assert pipe is not None
        try:
            pipe.write(pack(message))
            pipe.flush()
        except BrokenPipeError:
            return  # it has ended: what it said last comes from _hear

    def end(self) -> None:
        for process in self._processes:
            process.kill()  # one that has brought its part has nothing left to do
            process.wait()
        for thread in self._threads:
            thread.join()  # they hear the end of their pipe
        for process, errors in zip(self._processes, self._errors, strict=True):
            for pipe in (process.stdin, process.stdout, errors):
                if pipe is not None:
                    try:
                        pipe.close()
                    except BrokenPipeError:
                        continue  # bytes for one that has gone


def _client(errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts a worker in a session of its own: an interrupt at the terminal is the load's to handle."""
    command = [sys.executable, "-m", "penstock.bench.load_worker"]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
    )
