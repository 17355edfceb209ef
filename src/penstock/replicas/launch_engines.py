"""launch_engines: starts one engine or several. The config says how many; the result is one client.
Knows the launchers of both cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.engine.launch import ENGINE, launch
from penstock.engine.watchdog import STEP_TIMEOUT

if TYPE_CHECKING:
    from penstock.replicas.replica_set import EngineClient


async def launch_engines(
    config: Config, engine: Sequence[str] = ENGINE, step_timeout: float = STEP_TIMEOUT
) -> EngineClient:
    """Starts the engines and waits until they are ready. Arguments and errors are those of
    launch.launch."""
    if config.parallel.data_parallel_size == 1:
        return await launch(config, engine, step_timeout)
    # imported here: takes 20 ms, which one engine need not wait for
    from penstock.replicas.launch_replicas import (
        launch_replicas,
    )

    return await launch_replicas(config, engine, step_timeout)
