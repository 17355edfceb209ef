"""Serves an engine's client over HTTP. Runs from the first connection to the end by a signal, a
dead engine or a failure of uvicorn. Knows uvicorn; routes and bodies are in routes.py and its
handlers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import uvicorn
from starlette.applications import Starlette

from penstock.errors import EngineError, PenstockError, UsageError
from penstock.models.generation_config import read_generation_defaults
from penstock.server.api_server.certificate import CertificateFiles
from penstock.server.api_server.http_protocol import http_protocol
from penstock.server.api_server.port import port_error, url_of
from penstock.server.api_server.routes import build_app
from penstock.server.api_server.shutdown import StopSignals
from penstock.server.batch.manager import BatchManager
from penstock.server.batch.state_folder import StateFolder
from penstock.server.online.access_log import open_log
from penstock.server.online.app_state import AppState
from penstock.server.online.auth import AccessPolicy, is_loopback
from penstock.server.online.metrics import Board, Metrics
from penstock.server.openai.http_limits import HttpLimits
from penstock.text.parsers.parser_registry import NO_PARSERS, TEMPLATE, AnswerParsers

if TYPE_CHECKING:
    from penstock.engine.build_engine import EngineFacts
    from penstock.replicas.replica_set import EngineClient
    from penstock.text.tokenizer import Tokenizer

LOOK_EVERY = 0.1  # seconds between checks that the engine is alive
LAST_WORDS = 1.0  # seconds for waiting requests to get the error after the engine died
BACKLOG = 4096  # connections that the kernel queues while the event loop is busy
# thresholds of the garbage collector while serving; Python's are 700, 10, 10
COLLECT_EVERY = (20_000, 20, 20)


@dataclass(frozen=True, slots=True)
class Site:
    """A server's settings apart from its engine. name: the served model's name."""

    name: str
    access: AccessPolicy
    limits: HttpLimits
    access_log: str | None = None
    parsers: AnswerParsers = NO_PARSERS
    certificate: CertificateFiles | None = None  # None: HTTP without TLS

    @property
    def scheme(self) -> str:
        return "http" if self.certificate is None else "https"


async def serve_engine(
    client: EngineClient,
    listener: socket.socket,
    site: Site,
    stop: StopSignals,
    ready: Callable[[], None],
    board: Board | None = None,
    state: StateFolder | None = None,
) -> None:
    """Serves until a stop signal. Calls `ready` once connections are accepted. board: shared
    metrics of several server processes; None: this is the only one. state: folder of files and
    batches, or None. Raises EngineError if the engine died."""
    first = board is None or board.first
    if first:
        tell_unserved(Path(client.facts.folder), sys.stderr)
        tell_fit(client.facts, sys.stderr)
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(BACKLOG)
    except OSError as error:  # another server took the port meanwhile
        raise port_error(host, port, error) from error

    def begun() -> None:
        if first:
            print(f"penstock: {listens(site, host, port)}", file=sys.stderr, flush=True)
        ready()

    async with opened_app(client, site, board, state) as (app, service, manager):
        protocol = http_protocol(site.limits, files=state is not None, access=site.access)
        config = _uvicorn_config(app, protocol, site.certificate)
        async with _followed(config, site.certificate):
            await _run(service, manager, _Server(config), listener, stop, begun)


@contextlib.asynccontextmanager
async def _followed(
    config: uvicorn.Config, certificate: CertificateFiles | None
) -> AsyncIterator[None]:
    """Reloads the certificate whenever it is renewed, while the block runs."""
    if certificate is None:
        yield
        return
    config.load()
    assert config.ssl is not None, "uvicorn makes a context where there is a certificate"
    following = asyncio.create_task(certificate.follow(config.ssl))
    try:
        yield
    finally:
        following.cancel()


@contextlib.asynccontextmanager
async def opened_app(
    client: EngineClient, site: Site, board: Board | None = None, state: StateFolder | None = None
) -> AsyncIterator[tuple[Starlette, AppState, BatchManager | None]]:
    """Yields the application over an engine, with its state and its batch manager, for a caller
    that handles the connections. The caller ends the manager first, then the state. board, state:
    see serve_engine."""
    check_template(client.tokenizer, site.parsers)
    servers = 1 if board is None else board.servers
    metrics = Metrics(client, site.name, board)
    service = AppState(
        client=client,
        model=site.name,
        metrics=metrics,
        limits=site.limits,
        servers=servers,
        keys=site.access.keys,
        admin_without_key=site.access.admin_without_key,
        parsers=site.parsers,
    )
    manager = None if state is None else BatchManager(service, state)
    with open_log(site.access_log) as log:
        begun = asyncio.create_task(_begin_sandboxes(service, say=board is None or board.first))
        try:
            yield build_app(service, site.access, log, manager), service, manager
        finally:
            begun.cancel()
            service.close_sandboxes()


async def _begin_sandboxes(service: AppState, *, say: bool) -> None:
    """Starts the first sandbox process, which takes up to a second. If chats cannot be rendered,
    prints the reason (if `say`); requests with chats get the same error."""
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
    service: AppState,
    manager: BatchManager | None,
    server: _Server,
    listener: socket.socket,
    stop: StopSignals,
    ready: Callable[[], None],
) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if not serving.done():
        if manager is not None:
            await manager.go_on()
        ready()
    with rare_collections():
        await _watch(service, serving, stop)
        await _end(service, manager, server, serving, stop)


def check_template(tokenizer: Tokenizer | None, parsers: AnswerParsers) -> None:
    """Raises UsageError if answers are to be parsed by the model's response template and the model
    has none; TokenizerError if that template is invalid."""
    if parsers.tool_call_parser == TEMPLATE and (
        tokenizer is None or tokenizer.response_template is None
    ):
        message = (
            f"this model's tokenizer_config.json has no {TEMPLATE}: name another tool_call_parser"
        )
        raise UsageError(message, param="tool_call_parser")


def line(site: Site, listener: socket.socket) -> str:
    """Returns the line to print once the server is ready."""
    host, port = listener.getsockname()[:2]
    return f"penstock serves {site.name} at {url_of(host, port, site.scheme)}/v1"


def listens(site: Site, host: str, port: int) -> str:
    """Returns the line to print with the address and the number of API keys."""
    keys = len(site.access.keys)
    who = f"keys: {keys}" if keys else "keys: none"
    if not keys:
        who += ", and others can reach it" if not is_loopback(host) else ", for this machine alone"
    return f"listens on {url_of(host, port, site.scheme)}, {who}"


def tell_fit(facts: EngineFacts, err: TextIO) -> None:
    """Prints the model, its dtype and device, and how many tokens fit into the KV cache and rows
    into a batch."""
    told = facts.about
    what = [facts.model]
    what += (
        [f"in {told['dtype']} on {told['device']}"] if {"dtype", "device"} <= told.keys() else []
    )
    fits = [f"{told['kv_tokens']:,} KV tokens"] if "kv_tokens" in told else []
    fits += [f"{facts.max_num_seqs:,} rows", f"contexts of {facts.max_model_len:,}"]
    print(
        f"penstock: {' '.join(what)}: {', '.join(fits[:-1])} and {fits[-1]} fit",
        file=err,
        flush=True,
    )


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Makes the garbage collector skip all loaded objects and run rarely, since almost no garbage
    here is cyclic. With Python's settings and 1,000 open streams, a full collection ran twice a
    second and delayed every stream by 135 ms, or by 68 ms if it skipped the loaded objects. The
    server added 125 ms to the 99th percentile of latency; with this setting it adds 31 ms
    (benchmarks/streams.py, 30k events/s, 2 busy cores). Afterwards the objects are freed as usual
    again, unless some were frozen before (unswept.py): Python thaws all or none.
    """
    usual, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_EVERY)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        if not frozen:
            gc.unfreeze()


class _Server(uvicorn.Server):
    """Uvicorn's server without its signal handlers, which would end the process before the engine
    is closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(
    app: Any, protocol: type[asyncio.Protocol], certificate: CertificateFiles | None
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        ssl_certfile=None if certificate is None else certificate.certfile,
        ssl_keyfile=None if certificate is None else certificate.keyfile,
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


async def _watch(service: AppState, serving: asyncio.Task[None], stop: StopSignals) -> None:
    """Waits for a reason to end: a signal, a dead engine, or the end of uvicorn's task."""
    while not service.client.gone and not serving.done() and not stop.first.is_set():
        service.metrics.share()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.first.wait(), LOOK_EVERY)


async def _end(
    service: AppState,
    manager: BatchManager | None,
    server: _Server,
    serving: asyncio.Task[None],
    stop: StopSignals,
) -> None:
    """Waits for running requests, then ends the others with an error and stops the server. Batches
    stop at the same time, so that neither waits for the other. Raises EngineError if the engine has
    died, and the error of uvicorn's task."""
    died = service.client.gone
    server.should_exit = True
    open_requests = len(server.server_state.tasks)
    if stop.first.is_set() and not stop.second.is_set() and open_requests and service.servers == 1:
        tell_drain(
            f"{open_requests} running request{'s' * (open_requests > 1)}",
            service.limits.drain_seconds,
        )
    batches = (
        None if manager is None else asyncio.ensure_future(manager.end(stop.second, died=died))
    )
    second = asyncio.ensure_future(stop.second.wait())
    patience = LAST_WORDS if died else service.limits.drain_seconds
    await asyncio.wait((serving, second), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
    service.close()
    await asyncio.wait((serving,), timeout=LAST_WORDS)
    second.cancel()
    server.force_exit = True
    await asyncio.wait((serving,), timeout=LAST_WORDS)
    serving.cancel()
    if batches is not None:
        await batches
    fault = serving.exception() if serving.done() and not serving.cancelled() else None
    if service.client.gone:
        raise engine_died(service.client.death) from fault
    if fault is not None:
        raise fault


def tell_drain(what: str, seconds: float) -> None:
    """Prints what the server waits for after the first signal. seconds: the longest wait."""
    print(
        f"penstock: lets {what} end, for {seconds:g} s at most; a second signal ends it at once",
        file=sys.stderr,
    )


def engine_died(why: str | None) -> EngineError:
    """Returns the error that ends the process after the engine's death. why: the engine's last
    message, or None."""
    return EngineError(
        f"the engine died while serving: {why or 'its last words are above'}; start the server"
        " again"
    )


def tell_unserved(folder: Path, err: TextIO) -> None:
    """Prints the settings in the model's generation_config.json that Penstock doesn't apply, since
    other engines apply them. The engine has read the file before, so it is valid."""
    names = read_generation_defaults(folder).unserved
    if names:
        told = ", ".join(name if name.isidentifier() else repr(name) for name in names)
        print(
            f"penstock: the model's generation_config.json asks for {told}: not served, samples are"
            " drawn without",
            file=err,
            flush=True,
        )
