"""Runs several server processes on one port. For `penstock serve --api-server-count N`. This parent
process starts and ends the server processes (worker.py) and the engines, and accepts no connections
itself. The death of a server process ends the service, and so does the death of the only engine.
Knows processes; no routes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, TextIO

import msgspec

from penstock.children.carried_error import CarriedError
from penstock.children.spawn import could_not_start, how_ended
from penstock.config import Config
from penstock.errors import EngineError, PenstockError, UsageError
from penstock.replicas.replica_words import WordDown, WordUp
from penstock.replicas.supervisor import Supervisor
from penstock.server.api_server.port import bind, port_error
from penstock.server.api_server.shutdown import StopSignals, signals, unless_stopped
from penstock.server.api_server.site import LAST_WORDS, Site, engine_died, line, tell_drain
from penstock.server.api_server.worker import Down, ServerDrain, ServerStart, Serves, Up
from penstock.server.online.metrics import Board

MOST = 64  # most server processes
WORKER = (sys.executable, "-m", "penstock.server.api_server.worker")


async def serve_processes(
    config: Config, host: str, port: int, site: Site, count: int, out: TextIO, engine: Sequence[str]
) -> None:
    """Serves with `count` server processes until SIGINT, SIGTERM or SIGHUP, then returns. out: file
    for the start lines. engine: command line of an engine process. Raises the errors of `serve`."""
    if not 1 < count <= MOST:
        raise UsageError(
            f"api_server_count must be between 1 and {MOST}, not {count}", param="api_server_count"
        )
    if sys.platform != "linux":
        raise UsageError(
            "more than one API server needs Linux: leave --api-server-count out",
            param="api_server_count",
        )
    config.check()
    with signals() as stop, share_port(host, port, count) as listeners:
        said = line(site, listeners[0])
        service = _Service(config, site, stop, count, engine)
        try:
            await service.start_servers(listeners)
            if await unless_stopped(service.ready(), stop):
                print(said, file=out, flush=True)
                await service.run()
        finally:
            await service.end()


@contextlib.contextmanager
def share_port(host: str, port: int, count: int) -> Iterator[list[socket.socket]]:
    """Yields `count` sockets of one port. The kernel spreads connections evenly over the sockets
    that listen. Raises the errors of `bind`."""
    with contextlib.ExitStack() as stack:
        # first bind without SO_REUSEPORT, which fails if another server has the port
        with bind(host, port) as probe:
            family, address = probe.family, probe.getsockname()
        # If two services shared the port, the kernel would spread connections over both. The probe
        # cannot see a service that has only begun to start. This abstract socket name can, and it
        # disappears with this process.
        name = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            name.bind(f"\0penstock {address[0]} {address[1]}")
            listeners = []
            for _ in range(count):
                listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                listener.bind(address)
                listeners.append(listener)
        except OSError as error:
            raise port_error(host, address[1], error) from error
        yield listeners


class _Worker:
    """A server process, as seen by its parent. hear: function that takes its messages about
    engines."""

    def __init__(
        self, number: int, process: asyncio.subprocess.Process, hear: Callable[[WordUp], None]
    ) -> None:
        self.number, self.process, self._hear = number, process, hear
        self._serves = asyncio.Event()
        self.why: PenstockError | None = None  # error that the process reported before its end
        self._reading = asyncio.create_task(self._read())

    def say(self, word: Down | ServerStart) -> None:
        if self.process.returncode is None and self.process.stdin is not None:
            self.process.stdin.write(msgspec.json.encode(word) + b"\n")

    async def ready(self) -> None:
        """Waits until the process serves. Raises its error if it ends before."""
        serves = asyncio.ensure_future(self._serves.wait())
        await asyncio.wait((serves, self._reading), return_when=asyncio.FIRST_COMPLETED)
        serves.cancel()
        if not self._serves.is_set():
            ended = (
                f"API server {self.number} {how_ended(await self.process.wait())} while it started"
            )
            raise self.why or EngineError(ended)

    async def last_words(self) -> PenstockError | None:
        """Waits for the process to end and returns the error that it reported; None if it reported
        none."""
        await self._reading
        return self.why

    async def _read(self) -> None:
        assert self.process.stdout is not None
        decoder: msgspec.json.Decoder[Up] = msgspec.json.Decoder(Up)
        while (heard := await self.process.stdout.readline()).endswith(b"\n"):
            word = decoder.decode(heard)
            if isinstance(word, Serves):
                self._serves.set()
            elif isinstance(word, CarriedError):
                self.why = word.error()
            else:
                self._hear(word)


class _Service:
    """The server processes, and through their supervisor the engine processes."""

    def __init__(
        self, config: Config, site: Site, stop: StopSignals, count: int, engine: Sequence[str]
    ) -> None:
        self._config, self._site, self._stop, self._count = config, site, stop, count
        self._workers: list[_Worker] = []
        fronts = [partial(self._tell, number) for number in range(count)]
        self._engines = Supervisor(config, fronts, engine, site.limits.step_timeout)

    async def start_servers(self, listeners: list[socket.socket]) -> None:
        """Starts the server processes. Closes the listening sockets in this process, since
        connections to a socket that nobody accepts on would hang. Raises CapacityError."""
        model, replicas = self._config.model, self._config.parallel.data_parallel_size
        board = Board.make(self._count)
        try:
            for number, listener in enumerate(listeners):
                descriptors = (listener.fileno(), board)
                worker = _Worker(
                    number, await _start_process(descriptors), partial(self._engines.hear, number)
                )
                self._workers.append(worker)
                tokenizer = not model.skip_tokenizer_init
                start = ServerStart(
                    *descriptors, number, self._count, self._site, tokenizer, replicas, model.seed
                )
                worker.say(start)
                listener.close()
        finally:
            os.close(board)

    def _tell(self, number: int, word: WordDown) -> None:
        self._workers[number].say(word)

    async def ready(self) -> bool:
        """Waits until all processes serve, and returns True. Raises the first error of a server
        process or an engine."""
        await asyncio.gather(self._engines.start(), *(worker.ready() for worker in self._workers))
        return True

    async def run(self) -> None:
        """Runs until a signal comes or a process dies, and then until running requests have ended.
        Raises EngineError if a server process or the only engine died."""
        over = asyncio.ensure_future(self._engines.wait())
        reasons: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._stop.first.wait()), over]
        reasons += [asyncio.ensure_future(worker.process.wait()) for worker in self._workers]
        await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
        if self._stop.first.is_set():
            tell_drain("running requests", self._site.limits.drain_seconds)
            await self._drain()
        else:
            # Server processes end soon after their engine. If both have ended, the engine's death
            # is the cause.
            died, _ = await asyncio.wait((over,), timeout=LAST_WORDS / 2)
            dead = next(
                (worker for worker in self._workers if worker.process.returncode is not None), None
            )
            await self._drain()
            if not died and dead is not None:
                raise await self._end_of(dead)
        for each in reasons:
            each.cancel()
        # the engine may also have died while the servers waited for running requests
        if self._engines.death:
            raise engine_died(self._engines.death)

    async def _end_of(self, dead: _Worker) -> PenstockError:
        """Returns the error of a service whose server process died while the engines run."""
        why = await dead.last_words()
        # only this server process saw how the only engine failed
        if isinstance(why, EngineError):
            return why
        return EngineError(
            f"API server {dead.number} of {len(self._workers)} {how_ended(dead.process.returncode)}"
            " while serving, and the service with it: start it again"
        )

    async def end(self) -> None:
        """Ends all server processes and engines."""
        for worker in self._workers:
            await _kill(worker.process)
        if not self._workers or any(worker.process.returncode != 0 for worker in self._workers):
            self._engines.kill()
        await self._engines.end(self._stop.second)

    async def _drain(self) -> None:
        """Tells all server processes to end, and waits for them up to their time limit."""
        self._engines.retire()
        for worker in self._workers:
            worker.say(ServerDrain())
        processes = [worker.process for worker in self._workers]
        longest = self._site.limits.drain_seconds + 4 * LAST_WORDS
        gone = await self._until_second(_ended(processes, longest))
        if not gone.done():
            for worker in self._workers:
                worker.say(ServerDrain())
        await gone

    async def _until_second(self, work: Coroutine[Any, Any, bool]) -> asyncio.Future[bool]:
        """Waits until `work` ends or a second signal arrives. Returns the task of `work`."""
        going, second = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.second.wait())
        await asyncio.wait((going, second), return_when=asyncio.FIRST_COMPLETED)
        second.cancel()
        return going


async def _start_process(descriptors: Sequence[int]) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    try:
        return await asyncio.create_subprocess_exec(
            *WORKER, stdin=pipe, stdout=pipe, pass_fds=descriptors
        )
    except OSError as error:
        raise could_not_start("an API server's process", error) from error


async def _ended(processes: Sequence[asyncio.subprocess.Process], seconds: float) -> bool:
    """Returns True if all processes end within `seconds`."""
    waits = [asyncio.ensure_future(process.wait()) for process in processes]
    _, running = await asyncio.wait(waits, timeout=seconds)
    for each in running:
        each.cancel()
    return not running


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()
