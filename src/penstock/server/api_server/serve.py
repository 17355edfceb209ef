"""The work of `penstock serve`. Binds the port before the engine loads, starts the engine in
another process, and serves the routes. Knows uvicorn and the launch of an engine; routes and bodies
are in routes.py and its handlers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import uvloop

from penstock.children.lifetime import lose_lines
from penstock.config import Config
from penstock.engine.launch import ENGINE
from penstock.errors import UsageError
from penstock.replicas.launch_engines import launch_engines
from penstock.server.api_server.certificate import CertificateFiles
from penstock.server.api_server.port import bind
from penstock.server.api_server.shutdown import fast_exit, signals, unless_stopped
from penstock.server.api_server.site import Site, line, serve_engine
from penstock.server.batch.state_folder import StateFolder, opened
from penstock.server.online.access_log import open_log
from penstock.server.online.api_keys import ENVIRONMENT, gather_keys
from penstock.server.online.auth import AccessPolicy, check_hosts, check_origins, check_public
from penstock.server.openai.http_limits import HttpLimits
from penstock.text.parsers.parser_registry import NO_PARSERS, AnswerParsers


def serve(
    config: Config,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    served_model_name: str | None = None,
    api_key: str | Sequence[str] = (),
    api_key_file: Path | None = None,
    allow_no_key: bool = False,
    allow_admin_without_key: bool = False,
    allowed_hosts: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
    ssl_certfile: Path | str | None = None,
    ssl_keyfile: Path | str | None = None,
    limits: HttpLimits | None = None,
    parsers: AnswerParsers | None = None,
    api_server_count: int = 1,
    state_dir: Path | str | None = None,
    access_log: str | None = None,
    own_process: bool = False,
    out: TextIO | None = None,
    engine: Sequence[str] = ENGINE,
) -> None:
    """Serves until SIGINT, SIGTERM or SIGHUP, then returns. Port 0 takes a free port, which the
    start line names.

    api_server_count: processes that answer HTTP; with 1 it is this process. engine: command line of
    the engine process; benchmarks pass one that computes nothing. api_key, api_key_file: see
    api_keys.py. Without both, the environment variable PENSTOCK_API_KEY counts; it is then removed
    from the environment. allowed_hosts, allowed_origins: see auth.py. ssl_certfile, ssl_keyfile:
    see certificate.py. state_dir: folder of files and batches; None: they are not served.
    access_log: file that gets a line of JSON per request; `-` is standard error. parsers: for tool
    calls and reasoning in chats' answers. own_process: end the process with the server, without
    waiting for threads that still tokenize. Failed writes to standard output or error lose their
    lines and raise nothing.

    Raises UsageError (invalid host, port or key), CapacityError (port in use), errors of the
    engine's start, and EngineError if the engine dies later.
    """
    lose_lines()
    if served_model_name == "":
        raise UsageError(
            "served_model_name is empty: give the name that clients ask for",
            param="served_model_name",
        )
    limits = limits or HttpLimits()
    limits.check()
    parsers = parsers or NO_PARSERS
    parsers.check()
    keys = gather_keys([api_key] if isinstance(api_key, str) else api_key, api_key_file, os.environ)
    # engines, sandboxes and mask processes must not inherit the API key
    os.environ.pop(ENVIRONMENT, None)
    if keys and allow_admin_without_key:
        message = (
            "there are API keys, and an admin's has these routes: leave"
            " --allow-admin-without-key out"
        )
        raise UsageError(message, param="allow_admin_without_key")
    access = AccessPolicy(
        keys=keys,
        hosts=check_hosts(allowed_hosts),
        origins=check_origins(allowed_origins),
        admin_without_key=allow_admin_without_key,
    )
    check_public(host, access, allow_no_key=allow_no_key)
    with open_log(access_log):
        certificate = CertificateFiles.of(ssl_certfile, ssl_keyfile)
        site = Site(
            served_model_name or config.model.model,
            access,
            limits,
            access_log,
            parsers,
            certificate,
        )
    if state_dir is not None and api_server_count > 1:
        message = (
            "files and batches are kept by one server process: leave --state-dir or"
            " --api-server-count out"
        )
        raise UsageError(message, param="state_dir")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if api_server_count == 1:
            with contextlib.closing(bind(host, port)) as listener, opened(state_dir) as state:
                ending = fast_exit() if own_process else contextlib.nullcontext()
                runner.run(_serve(config, listener, site, out or sys.stdout, engine, state, ending))
        else:
            from penstock.server.api_server.multi_process import serve_processes

            runner.run(
                serve_processes(
                    config, host, port, site, api_server_count, out or sys.stdout, engine
                )
            )


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
        client = await unless_stopped(
            launch_engines(config, engine, site.limits.step_timeout), stop
        )
        if client is None:
            return
        with ending:
            try:
                said = line(site, listener)
                await serve_engine(
                    client,
                    listener,
                    site,
                    stop,
                    lambda: print(said, file=out, flush=True),
                    state=state,
                )
            finally:
                await client.close(stop.second)
