"""launch_replicas: starts several engines, owned by this process. Returns one client for this event
loop. Joins a Supervisor and a ReplicaSet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.config import Config
from penstock.engine.launch import ENGINE
from penstock.engine.watchdog import STEP_TIMEOUT
from penstock.replicas.placement import HostFacts
from penstock.replicas.replica_set import ReplicaSet
from penstock.replicas.replica_words import WordUp
from penstock.replicas.supervisor import Supervisor


class OwnReplicas(ReplicaSet):
    """A ReplicaSet whose engines belong to this process and end with it."""

    def __init__(
        self, config: Config, engine: Sequence[str], step_timeout: float, host: HostFacts | None
    ) -> None:
        model, count = config.model, config.parallel.data_parallel_size
        super().__init__(
            count,
            self._up,
            seed=model.seed,
            tokenizer=not model.skip_tokenizer_init,
            step_timeout=step_timeout,
        )
        self.supervisor = Supervisor(config, [self.hear], engine, step_timeout, host)

    def _up(self, word: WordUp) -> None:
        self.supervisor.hear(0, word)

    async def close(self, hurry: asyncio.Event | None = None) -> None:
        self.supervisor.retire()
        await super().close()
        await self.supervisor.end(hurry)


async def launch_replicas(
    config: Config,
    engine: Sequence[str] = ENGINE,
    step_timeout: float = STEP_TIMEOUT,
    host: HostFacts | None = None,
) -> ReplicaSet:
    """Starts `data_parallel_size` engines and waits until each is ready or has failed. Raises the
    first one's error if none is ready, UsageError or CapacityError if they cannot be placed. Other
    arguments are those of launch.launch."""
    config.check()
    made = OwnReplicas(config, engine, step_timeout, host)
    try:
        await made.supervisor.start()
    except BaseException:
        made.supervisor.kill()
        await made.close()
        raise
    return made
