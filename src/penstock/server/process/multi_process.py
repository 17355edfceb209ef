"""`penstock serve --api-server-count N`: N server processes (worker.py) on one port, over one engine. This process
starts, tells and ends them, and takes no connection; one that ends unasked ends the service. It knows processes; no
routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TextIO

import msgspec

from penstock.config import Config
from penstock.engine.async_client import HURRIED
from penstock.engine.channel import Failed
from penstock.engine.client import error_of
from penstock.engine.engine import Refused
from penstock.engine.launch import addresses, start
from penstock.errors import CapacityError, EngineError, PenstockError, UsageError
from penstock.server.online.metrics import Board
from penstock.server.process.port import bind, port_error
from penstock.server.process.shutdown import StopSignals, signals, unless_stopped
from penstock.server.process.site import LAST_WORDS, Site, engine_died, line, tell_drain
from penstock.server.process.worker import Down, EngineEnded, ServerDrain, ServerStart, Up

MOST = 64  # server processes
WORKER = (sys.executable, "-m", "penstock.server.process.worker")
ENGINE_PATIENCE = 10.0  # seconds that the engine gets to end after its last client


async def serve_processes(
    config: Config, host: str, port: int, site: Site, count: int, out: TextIO, engine: Sequence[str]
) -> None:
    """Serves until SIGINT, SIGTERM or SIGHUP, then returns. Raises as serve.serve() does."""
    if not 1 < count <= MOST:
        raise UsageError(f"api_server_count must be between 1 and {MOST}, not {count}", param="api_server_count")
    if sys.platform != "linux":
        raise UsageError("more than one API server needs Linux: leave --api-server-count out", param="api_server_count")
    config.check()
    with signals() as stop, share_port(host, port, count) as listeners, contextlib.ExitStack() as joining:
        said = line(site, listeners[0])
        places = joining.enter_context(addresses(count))
        service = _Service(site, stop, await start(config, places, engine, site.limits.step_timeout))
        try:
            await service.start_servers(listeners, places, tokenizer=not config.model.skip_tokenizer_init)
            if await unless_stopped(service.ready(), stop):
                joining.close()
                print(said, file=out, flush=True)
                await service.run()
        finally:
            await service.end()


@contextlib.contextmanager
def share_port(host: str, port: int, count: int) -> Iterator[list[socket.socket]]:
    """`count` sockets of one port; the kernel spreads connections evenly over those that listen. Raises as bind()."""
    with contextlib.ExitStack() as stack:
        with bind(host, port) as probe:  # shares with nobody: says whether another server has the port
            family, address = probe.family, probe.getsockname()
        # Of two services that share a port the kernel would mix the answers. Where the other doesn't listen yet, the
        # probe cannot tell; this name, which goes with us, can.
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
    """A server process, as its parent sees it."""

    def __init__(self, number: int, process: asyncio.subprocess.Process) -> None:
        self.number, self.process = number, process

    def say(self, word: Down | ServerStart) -> None:
        if self.process.returncode is None and self.process.stdin is not None:
            self.process.stdin.write(msgspec.json.encode(word) + b"\n")

    async def ready(self) -> None:
        """Returns once it serves; raises what it raised."""
        word = await self._hear()
        if word is None:
            raise EngineError(f"API server {self.number} ended with code {await self.process.wait()} while it started")
        if isinstance(word, Failed):
            raise _error_of(word)

    async def last_words(self) -> PenstockError | None:
        """What one that has ended was ended by; None where it could not say."""
        word = await self._hear()
        return _error_of(word) if isinstance(word, Failed) else None

    async def _hear(self) -> Up | None:
        assert self.process.stdout is not None
        heard = await self.process.stdout.readline()
        word: Up | None = msgspec.json.decode(heard, type=Up) if heard.endswith(b"\n") else None
        return word


def _error_of(word: Failed) -> PenstockError:
    return error_of(Refused(-1, word.kind, word.message, word.param))


class _Service:
    """The engine's process and the servers'."""

    def __init__(self, site: Site, stop: StopSignals, engine: asyncio.subprocess.Process) -> None:
        self._site, self._stop, self._engine = site, stop, engine
        self._workers: list[_Worker] = []
        self._telling = asyncio.create_task(self._tell_end())

    async def start_servers(self, listeners: list[socket.socket], places: list[str], *, tokenizer: bool) -> None:
        """Raises CapacityError. The sockets are the servers' alone from here on: one that is kept by nobody who
        accepts would swallow connections."""
        count = len(listeners)
        board = Board.make(count)
        try:
            for number, (listener, address) in enumerate(zip(listeners, places, strict=True)):
                descriptors = (listener.fileno(), board)
                worker = _Worker(number, await _start_process(descriptors))
                self._workers.append(worker)
                worker.say(ServerStart(address, *descriptors, number, count, self._site, tokenizer))
                listener.close()
        finally:
            os.close(board)

    async def ready(self) -> bool:
        """True once all serve. Raises what one of them, or the engine, raised."""
        await asyncio.gather(*(worker.ready() for worker in self._workers))
        return True

    async def run(self) -> None:
        """Until there is a reason to end, and running requests have ended. Raises EngineError for a bad one."""
        reasons = [asyncio.ensure_future(self._stop.first.wait()), asyncio.ensure_future(self._engine.wait())]
        reasons += [asyncio.ensure_future(worker.process.wait()) for worker in self._workers]
        await asyncio.wait(reasons, return_when=asyncio.FIRST_COMPLETED)
        for each in reasons:
            each.cancel()
        if self._stop.first.is_set():
            tell_drain("running requests", self._site.limits.drain_seconds)
            await self._drain()
            if self._engine.returncode:  # amid the drain; else it ends after its last client, with 0
                raise engine_died(f"its process ended with code {self._engine.returncode}")
            return
        # Servers end soon after their engine; heard of in either order, it is the engine that died.
        if not await _ended([self._engine], LAST_WORDS / 2):
            dead = next(worker for worker in self._workers if worker.process.returncode is not None)
            why = await dead.last_words()
            if isinstance(why, EngineError):  # it saw the engine hang, which dies with us
                await _kill(self._engine)
                await self._drain()
                raise why
            await self._drain()
            raise EngineError(
                f"API server {dead.number} of {len(self._workers)} ended with code {dead.process.returncode} while "
                "serving, and the service with it: start it again"
            )
        await self._drain()
        raise engine_died(f"its process ended with code {self._engine.returncode}")

    async def end(self) -> None:
        """Leaves no process behind."""
        for worker in self._workers:
            await _kill(worker.process)
        if self._workers and all(worker.process.returncode == 0 for worker in self._workers):
            await self._engine_ended()
        await _kill(self._engine)
        await self._telling

    async def _drain(self) -> None:
        """Tells all servers to end and waits for them, no longer than they may take."""
        for worker in self._workers:
            worker.say(ServerDrain())
        processes = [worker.process for worker in self._workers]
        longest = self._site.limits.drain_seconds + 4 * LAST_WORDS
        gone = await self._until_second(_ended(processes, longest))
        if not gone.done():
            for worker in self._workers:
                worker.say(ServerDrain())
        await gone

    async def _engine_ended(self) -> None:
        """It ends after its last client; a second signal shortens the wait for that."""
        ended = await self._until_second(_ended([self._engine], ENGINE_PATIENCE))
        if not ended.done():
            await asyncio.wait((ended,), timeout=HURRIED)
        ended.cancel()

    async def _until_second(self, work: Coroutine[Any, Any, bool]) -> asyncio.Future[bool]:
        """Waits for work to end, no longer than for a second signal."""
        going, second = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.second.wait())
        await asyncio.wait((going, second), return_when=asyncio.FIRST_COMPLETED)
        second.cancel()
        return going

    async def _tell_end(self) -> None:
        code = await self._engine.wait()
        for worker in self._workers:
            worker.say(EngineEnded(code))


async def _start_process(descriptors: Sequence[int]) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    try:
        return await asyncio.create_subprocess_exec(*WORKER, stdin=pipe, stdout=pipe, pass_fds=descriptors)
    except OSError as error:
        raise CapacityError(
            f"an API server's process could not be started: {error.strerror}: free memory or raise the process limit"
        ) from error


async def _ended(processes: Sequence[asyncio.subprocess.Process], seconds: float) -> bool:
    """Whether all of them have ended within that time."""
    waits = [asyncio.ensure_future(process.wait()) for process in processes]
    _, running = await asyncio.wait(waits, timeout=seconds)
    for each in running:
        each.cancel()
    return not running


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()
