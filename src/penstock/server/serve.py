"""`penstock serve`: a port, an engine in another process, and the routes over it, from start to end.

The port is taken before the engine loads, signals are ours from the first moment, and whatever ends the server ends
the engine too. It knows uvicorn and the launch of an engine; routes and bodies are app's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import uvicorn
import uvloop

from penstock.config import Config
from penstock.engine.launch import ENGINE, launch
from penstock.engine.parent_death import lose_lines
from penstock.errors import EngineError, PenstockError, UsageError
from penstock.server.access_log import open_log
from penstock.server.app import build_app
from penstock.server.batch.manager import BatchManager
from penstock.server.batch.state_folder import StateFolder, opened
from penstock.server.connection import connection_of
from penstock.server.defaults import tell_unserved
from penstock.server.doors import Doors, check_hosts, check_public
from penstock.server.keys import gather_keys
from penstock.server.leaving import leaving
from penstock.server.limits import Limits
from penstock.server.metrics import Board, Metrics
from penstock.server.port import bind, port_error, url_of
from penstock.server.porter import Porter
from penstock.server.service import Service
from penstock.server.stop import Stop, signals, unless_stopped

if TYPE_CHECKING:
    from penstock.engine.async_client import AsyncClient

LOOK_EVERY = 0.1  # seconds between looks at the engine's life
LAST_WORDS = 1.0  # seconds that waiting requests get to hear that the engine died
BACKLOG = 4096  # connections the kernel holds while the loop is busy
COLLECT_EVERY = (20_000, 20, 20)  # the collector's thresholds while we serve; Python's own are 700, 10, 10


def serve(
    config: Config,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str | None = None,
    api_key: str | Sequence[str] = (),
    api_key_file: Path | None = None,
    allow_no_key: bool = False,
    allowed_hosts: Sequence[str] = (),
    limits: Limits | None = None,
    api_server_count: int = 1,
    state_dir: Path | str | None = None,
    access_log: str | None = None,
    own_process: bool = False,
    out: TextIO | None = None,
    engine: Sequence[str] = ENGINE,
) -> None:
    """Serves until SIGINT, SIGTERM or SIGHUP, then returns. Port 0 takes a free one, which the line at the start names.

    `api_server_count` processes answer HTTP; with one it is this process. `engine` is the command of the engine's
    process; benchmarks bring one that computes nothing. Keys, and `allowed_hosts`, are told in keys.py and doors.py;
    PENSTOCK_API_KEY counts where no key is given. `state_dir` is where files and batches live; without one they are not
    served. `access_log` is a file that a line of JSON for each request is added to; `-` is standard error.
    own_process: this process ends when the server does, and then waits for no thread that still tokenises. Lines that
    standard output or error doesn't take are lost from here on, and end nothing.

    Raises UsageError (host, port or key that cannot be), CapacityError (port in use), what the engine raises while
    loading, and EngineError if it dies later.
    """
    lose_lines()
    if served_model_name == "":
        raise UsageError("served_model_name is empty: give the name that clients ask for", param="served_model_name")
    limits = limits or Limits()
    limits.check()
    keys = gather_keys([api_key] if isinstance(api_key, str) else api_key, api_key_file, os.environ)
    doors = Doors(keys=keys, hosts=check_hosts(allowed_hosts))
    check_public(host, doors, allow_no_key=allow_no_key)
    with open_log(access_log):
        site = Site(served_model_name or config.model.model, doors, limits, access_log)
    if state_dir is not None and api_server_count > 1:
        message = "files and batches are kept by one server process: leave --state-dir or --api-server-count out"
        raise UsageError(message, param="state_dir")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if api_server_count == 1:
            with contextlib.closing(bind(host, port)) as listener, opened(state_dir) as state:
                ending = leaving() if own_process else contextlib.nullcontext()
                runner.run(_serve(config, listener, site, out or sys.stdout, engine, state, ending))
        else:
            from penstock.server.several import serve_several

            runner.run(serve_several(config, host, port, site, api_server_count, out or sys.stdout, engine))


@dataclass(frozen=True, slots=True)
class Site:
    """What a server is called and lets in, whatever engine is behind it."""

    name: str
    doors: Doors
    limits: Limits
    access_log: str | None = None


async def _serve(
    config: Config,
    listener: socket.socket,
    site: Site,
    out: TextIO,
    engine: Sequence[str],
    state: StateFolder | None,
    ending: contextlib.AbstractContextManager[None],
) -> None:
    with signals() as stop:
        client = await unless_stopped(launch(config, engine, site.limits.step_timeout), stop)
        if client is None:
            return
        with ending:
            try:
                said = line(site, listener)
                await serve_engine(client, listener, site, stop, lambda: print(said, file=out, flush=True), state=state)
            finally:
                await client.close(stop.second)


async def serve_engine(
    client: AsyncClient,
    listener: socket.socket,
    site: Site,
    stop: Stop,
    ready: Callable[[], None],
    board: Board | None = None,
    state: StateFolder | None = None,
) -> None:
    """Serves until told to stop; `ready` is called once connections are taken. Raises EngineError if it died."""
    metrics = Metrics(client, site.name, board)
    servers = 1 if board is None else board.servers
    service = Service(
        client=client, model=site.name, metrics=metrics, limits=site.limits, servers=servers, keys=site.doors.keys
    )
    service.desk = None if state is None else BatchManager(service, state)
    if board is None or board.first:
        tell_unserved(Path(client.facts.folder), sys.stderr)
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(BACKLOG)
    except OSError as error:  # another server took the port while ours was loading
        raise port_error(host, port, error) from error
    with open_log(site.access_log) as log:
        protocol = connection_of(site.limits, Porter(service.queue, site.doors, log), files=state is not None)
        server = _Server(_uvicorn_config(build_app(service, site.doors, log), protocol))
        begun = asyncio.create_task(_begin_sandboxes(service, say=board is None or board.first))
        try:
            await _run(service, server, listener, stop, ready)
        finally:
            begun.cancel()
            service.close_sandboxes()


async def _begin_sandboxes(service: Service, *, say: bool) -> None:
    """Has the first sandbox warm, which takes a second or less, and says where a template can't be served. What else is
    wrong with it is told to the requests that need it."""
    tokenizer = service.client.tokenizer
    if tokenizer is None:
        return
    try:
        fault = await service.sandboxes.begin()
    except PenstockError as error:
        fault = error
    if say and fault is not None and tokenizer.chat_templates:
        print(f"penstock: chats are refused: {fault}", file=sys.stderr)


async def _run(
    service: Service, server: _Server, listener: socket.socket, stop: Stop, ready: Callable[[], None]
) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if not serving.done():
        if service.desk is not None:
            await service.desk.go_on()
        ready()
    with _rare_collections():
        await _watch(service, serving, stop)
        await _end(service, server, serving, stop)


def line(site: Site, listener: socket.socket) -> str:
    """What is said once it serves."""
    host, port = listener.getsockname()[:2]
    return f"penstock serves {site.name} at {url_of(host, port)}/v1"


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Has the garbage collector leave what is loaded alone and look at the rest seldom; almost nothing here is cyclic.

    A full collection with 1,000 streams open held every one of them up for 135 ms, 68 ms without what was loaded, twice
    a second: p99 behind the engine 125 ms, and 31 ms as it is here (benchmarks/streams.py, 30k events/s, 2 busy cores).
    """
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_EVERY)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: they would end the process before the engine is closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(app: Any, protocol: type[asyncio.Protocol]) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=75,
    )


async def _watch(service: Service, serving: asyncio.Task[None], stop: Stop) -> None:
    """Returns when there is a reason to end: a signal, a dead engine, a server that stopped."""
    while service.client.alive and not serving.done() and not stop.first.is_set():
        service.metrics.share()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.first.wait(), LOOK_EVERY)


async def _end(service: Service, server: _Server, serving: asyncio.Task[None], stop: Stop) -> None:
    """Lets running requests end, tells the others, and stops the server; batches stop meanwhile, so that neither waits
    for the other. Raises EngineError if the engine died, by now or meanwhile, and what the server's own task raised."""
    died = not service.client.alive
    server.should_exit = True
    open_requests = len(server.server_state.tasks)
    if stop.first.is_set() and not stop.second.is_set() and open_requests and service.servers == 1:
        tell_drain(f"{open_requests} running request{'s' * (open_requests > 1)}", service.limits.drain_seconds)
    desk = None if service.desk is None else asyncio.ensure_future(service.desk.end(stop.second, died=died))
    second = asyncio.ensure_future(stop.second.wait())
    patience = LAST_WORDS if died else service.limits.drain_seconds
    await asyncio.wait((serving, second), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
    service.close()
    await asyncio.wait((serving,), timeout=LAST_WORDS)
    second.cancel()
    server.force_exit = True
    await asyncio.wait((serving,), timeout=LAST_WORDS)
    serving.cancel()
    if desk is not None:
        await desk
    fault = serving.exception() if serving.done() and not serving.cancelled() else None
    if not service.client.alive:
        raise engine_died(service.client.death) from fault
    if fault is not None:
        raise fault


def tell_drain(what: str, seconds: float) -> None:
    """What whoever sent the first signal sees while it waits."""
    print(f"penstock: lets {what} end, for {seconds:g} s at most; a second signal ends it at once", file=sys.stderr)


def engine_died(why: str | None) -> EngineError:
    """What the process ends with."""
    return EngineError(f"the engine died while serving: {why or 'its last words are above'}; start the server again")
