"""One replica on Ray Serve. It is an engine in its own process, as under `penstock serve`, and
Penstock's HTTP application over it, to which Serve passes its connections. Knows the parts of a
server; deployment.py has the options for Serve."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.engine.launch import ENGINE, launch
from penstock.errors import EngineError
from penstock.on_ray.deployment import RayDeployment
from penstock.on_ray.ray_scaling import SHARE, share_of
from penstock.server.api_server.site import (
    LAST_WORDS,
    LOOK_EVERY,
    Site,
    opened_app,
    rare_collections,
)
from penstock.server.batch.state_folder import opened
from penstock.server.online.api_keys import ENVIRONMENT, gather_keys
from penstock.server.online.auth import AccessPolicy, check_hosts, check_public
from penstock.server.openai.http_limits import HttpLimits

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from penstock.engine.async_client import AsyncClient

# address to assume if none is configured: all addresses of the machine
EVERYWHERE = "0.0.0.0"


class ServeReplica:
    """The class that Serve makes replicas of; Serve calls its methods by name.

    args: fields of RayDeployment and engine options. engine: command line of the engine process;
    tests pass one that computes nothing.
    """

    def __init__(self, args: dict[str, Any], engine: tuple[str, ...] = ENGINE) -> None:
        self._deployment = RayDeployment.of(args)
        self._engine = engine
        self._open = AsyncExitStack()
        self._draining = asyncio.Event()

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Starts the engine, and returns the application over it. Raises the errors of the engine's
        start."""
        deployment = self._deployment
        site = site_of(deployment)
        os.environ.pop(ENVIRONMENT, None)  # the engine process must not inherit the API key
        state = self._open.enter_context(opened(deployment.state_dir))
        self._client = await self._launch()
        self._open.push_async_callback(self._client.close)
        app, self._service, manager = await self._open.enter_async_context(
            opened_app(self._client, site, state=state)
        )
        if manager is not None:
            await manager.go_on()
            self._open.push_async_callback(manager.end)
        self._open.callback(self._service.close)
        self._open.enter_context(rare_collections())
        self._watching = asyncio.create_task(self._watch())
        return app

    async def _launch(self) -> AsyncClient:
        """Starts the engine. Raises EngineError after startup_timeout, and the errors of `launch`.
        Serve then tries again."""
        deployment = self._deployment
        try:
            async with asyncio.timeout(deployment.startup_timeout):
                return await launch(deployment.config, self._engine, deployment.step_timeout)
        except TimeoutError as error:
            raise EngineError(
                f"the engine was not ready after {deployment.startup_timeout:g} s: raise"
                " startup_timeout"
            ) from error

    def check_health(self) -> None:
        """Raises EngineError if the engine is dead."""
        if self._client.gone:
            raise EngineError(f"the engine died: {self._client.death}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the metric for Serve's scaling: how many replicas the work of this one would
        fill."""
        return {SHARE: share_of(self._client.stats(), self._deployment.target_seconds)}

    async def _watch(self) -> None:
        """Ends the process after its engine has died, once waiting callers have got the error.
        Serve then starts another replica at once."""
        while not self._client.gone:
            await asyncio.sleep(LOOK_EVERY)
        if not self._draining.is_set():
            print(
                f"penstock: the engine died while serving: {self._client.death}",
                file=sys.stderr,
                flush=True,
            )
            await asyncio.sleep(LAST_WORDS)  # time in which each waiting request gets its error
            os._exit(1)

    async def __del__(self) -> None:
        """Closes the server. Serve calls it when the running requests have ended or timed out."""
        self._draining.set()
        await self._open.aclose()


def site_of(deployment: RayDeployment) -> Site:
    """Returns the server settings of a replica: model name, access, limits. Raises UsageError."""
    limits = HttpLimits(
        drain_seconds=deployment.shutdown_timeout, step_timeout=deployment.step_timeout
    )
    limits.check()
    key_file = None if deployment.api_key_file is None else Path(deployment.api_key_file)
    keys = gather_keys([], key_file, os.environ)
    access = AccessPolicy(keys=keys, hosts=check_hosts(deployment.allowed_hosts))
    check_public(deployment.host or EVERYWHERE, access, allow_no_key=deployment.allow_no_key)
    return Site(
        deployment.served_model_name or deployment.config.model.model,
        access,
        limits,
        parsers=deployment.parsers,
    )
