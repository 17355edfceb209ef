"""One replica on Ray Serve: an engine in a process of its own, as under `penstock serve`, and our
application over it, which Serve gives its connections to. It knows the parts of a server; what
Serve is asked for is ray_deployment's.
"""

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

EVERYWHERE = (  # what a replica takes for granted of Serve's address where nothing is said of it
    "0.0.0.0"
)


class ServeReplica:
    """What Serve makes of a deployment: it calls what is here by these names.

    args: RayDeployment's.   engine: the command of the engine's process; tests bring one that
    computes nothing."""

    def __init__(self, args: dict[str, Any], engine: tuple[str, ...] = ENGINE) -> None:
        self._deployment = RayDeployment.of(args)
        self._engine = engine
        self._open = AsyncExitStack()
        self._draining = asyncio.Event()

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Starts the engine, and returns the application over it. Raises what the engine raised
        while it loaded."""
        deployment = self._deployment
        site = site_of(deployment)
        os.environ.pop(ENVIRONMENT, None)  # the engine is started with what is left
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
        """Raises EngineError where it takes too long, and what `launch` raises: then Serve tries
        anew."""
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
        """Raises EngineError where the engine is dead."""
        if self._client.gone:
            raise EngineError(f"the engine died: {self._client.death}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns how much of a replica its work would fill."""
        return {SHARE: share_of(self._client.stats(), self._deployment.target_seconds)}

    async def _watch(self) -> None:
        """With a dead engine the process ends, once whoever waits has heard of it: Serve starts
        another at once."""
        while not self._client.gone:
            await asyncio.sleep(LOOK_EVERY)
        if not self._draining.is_set():
            print(
                f"penstock: the engine died while serving: {self._client.death}",
                file=sys.stderr,
                flush=True,
            )
            await asyncio.sleep(LAST_WORDS)  # each call hears of it by its own client
            os._exit(1)

    async def __del__(self) -> None:
        """Serve calls it at the end, when running requests have ended or have had their time."""
        self._draining.set()
        await self._open.aclose()


def site_of(deployment: RayDeployment) -> Site:
    """Returns what the server of a replica is called and lets in. Raises UsageError."""
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
