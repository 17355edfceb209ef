"""Supervisor: starts and restarts a service's engines. It places them on GPUs, sends their
addresses to all fronts, restarts engines that end, after growing pauses, and can restart all of
them one by one without losing a request.

A front sends requests to engines: a ReplicaSet of this process, or a server process with one. The
supervisor tells it of each life (replica_words.py), and the front answers whether it could connect.
A single engine is handled the same way, but not restarted: the service ends with it. Knows
processes and messages; no requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from penstock.children.spawn import how_ended
from penstock.config import Config
from penstock.engine.async_client import HURRIED
from penstock.engine.fitted import ranks_of
from penstock.engine.launch import ENGINE, addresses, start
from penstock.engine.watchdog import STEP_TIMEOUT
from penstock.errors import CapacityError, EngineError, PenstockError
from penstock.replicas.placement import HostFacts, places
from penstock.replicas.replica_words import (
    Ended,
    Hung,
    Join,
    Joined,
    JoinFailed,
    Leave,
    WordDown,
    WordUp,
)

# Seconds before an ended replica is restarted: the first time, and at most, if it ends early
# again and again.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
# seconds that a client (front) gets to report why an engine that has ended had failed
LAST_WORDS = 1.0
END_PATIENCE = 10.0  # seconds engines get to end once no client (front) uses them


@dataclass(slots=True, eq=False)
class _Life:
    """One process of a replica. joining: clients (fronts) that have not connected to it yet.
    meeting: keeps the folder of socket addresses open until they have."""

    number: int
    replica: int
    process: asyncio.subprocess.Process
    joining: set[int]
    meeting: contextlib.ExitStack
    why: str | None = None  # why it ended, if a client (front) has reported it
    ready: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    leaving: bool = False

    @property
    def serves(self) -> bool:
        joined = self.ready.done() and self.ready.exception() is None
        return joined and not self.leaving and self.process.returncode is None


class Supervisor:
    """Keeps `data_parallel_size` engines running. fronts: one function per client (front) that
    sends it a message. engine: the command of an engine's process."""

    def __init__(
        self,
        config: Config,
        fronts: Sequence[Callable[[WordDown], None]],
        engine: Sequence[str] = ENGINE,
        step_timeout: float = STEP_TIMEOUT,
        host: HostFacts | None = None,
    ) -> None:
        """Raises UsageError or CapacityError if the engines cannot all be placed."""
        self._config, self._fronts, self._engine, self._step_timeout = (
            config,
            fronts,
            engine,
            step_timeout,
        )
        self.count = config.parallel.data_parallel_size
        self._places = places(
            self.count,
            ranks_of(config),
            config.model.device,
            config.memory.gpu_memory_utilization,
            host or (HostFacts.found() if self.count > 1 else HostFacts()),
        )
        self._lives: dict[int, _Life] = {}  # number -> engine process (life), while it runs
        self._now: list[_Life | None] = [None] * self.count  # latest process of each replica
        self._born = 0
        self._keeping: list[asyncio.Task[None]] = []
        self._rolling: asyncio.Task[None] | None = None
        self._died: str | None = None
        self._started = asyncio.Event()
        self._retired = False
        self._changed = asyncio.Event()  # set when an engine process has become ready or has ended

    @property
    def processes(self) -> list[asyncio.subprocess.Process]:
        """Returns the running engine processes."""
        return [life.process for life in self._lives.values()]

    async def start(self) -> None:
        """Starts all engines, and returns once each is ready or has failed; failed ones are
        restarted. Raises the first one's error if none is ready."""
        first = [asyncio.get_running_loop().create_future() for _ in range(self.count)]
        self._keeping = [
            asyncio.create_task(self._keep(replica, begun)) for replica, begun in enumerate(first)
        ]
        errors = [error for error in await asyncio.gather(*first) if error is not None]
        if len(errors) == self.count:
            raise errors[0]
        self._started.set()

    async def wait(self) -> None:
        """Waits until a single engine's process has ended; with several, for ever."""
        done, _ = await asyncio.wait(self._keeping, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # raises if the task failed by an error of our own code

    @property
    def death(self) -> str | None:
        """Cause of death of a single engine, in one line; None if it lives, ended normally, or
        there are several."""
        return self._died if self.count == 1 else None

    def hear(self, front: int, word: WordUp) -> None:
        """Processes a message from a client (front)."""
        if isinstance(word, (Joined, JoinFailed, Hung)):
            life = self._lives.get(word.life)
            if life is not None:
                self._of_life(life, front, word)
        elif self._rolling is None or self._rolling.done():
            self._rolling = asyncio.create_task(self._roll())

    def _of_life(self, life: _Life, front: int, word: Joined | JoinFailed | Hung) -> None:
        if isinstance(word, Joined):
            life.joining.discard(front)
            if not life.joining and not life.ready.done():
                life.ready.set_result(None)
            return
        if isinstance(word, Hung):
            life.why = word.why
        elif not life.ready.done():
            life.ready.set_exception(word.error.error())
        if life.process.returncode is None:
            life.process.kill()

    # --- keeping one replica running

    async def _keep(self, replica: int, first: asyncio.Future[PenstockError | None]) -> None:
        """Runs a replica: starts its process again each time it ends."""
        pause = 0.0
        while True:
            began = time.monotonic()
            error: PenstockError | None = None
            try:
                life = await self._begin(replica)
            except (PenstockError, OSError) as failed:
                # the process, or its address folder, could not be made
                life = None
                error = (
                    failed
                    if isinstance(failed, PenstockError)
                    else CapacityError(f"no engine: {failed}")
                )
            if life is not None:
                error = await self._live(life, first)
                self._died = str(error) if life.process.returncode else None
            if not first.done():
                first.set_result(error)
            if self.count == 1 or self._retired:
                return
            if life is not None and life.leaving and error is None:
                pause = 0.0
                continue
            await self._started.wait()
            lived = time.monotonic() - began
            pause = (
                FIRST_PAUSE
                if lived > LONGEST_PAUSE
                else min(LONGEST_PAUSE, max(FIRST_PAUSE, 2 * pause))
            )
            self._say(f"replica {replica}: {error}; it is started again in {pause:g} s")
            await asyncio.sleep(pause)

    async def _begin(self, replica: int) -> _Life:
        """Starts a replica's next process and tells the clients (fronts) its address."""
        number, self._born = self._born, self._born + 1
        with contextlib.ExitStack() as meeting:
            met = meeting.enter_context(addresses(len(self._fronts)))
            process = await start(
                self._config, met, self._engine, self._step_timeout, self._places[replica]
            )
            life = _Life(number, replica, process, set(range(len(self._fronts))), meeting.pop_all())
            life.ready.add_done_callback(lambda _: self._changed.set())
            self._lives[number] = self._now[replica] = life
            for front, address in zip(self._fronts, met, strict=True):
                front(Join(replica, number, address))
            return life

    async def _live(
        self, life: _Life, first: asyncio.Future[PenstockError | None]
    ) -> PenstockError | None:
        """Waits for the end of a replica's process and tells the clients (fronts). Returns why it
        ended; None if it was asked to."""
        ended = asyncio.ensure_future(life.process.wait())
        with life.meeting:
            await asyncio.wait((ended, life.ready), return_when=asyncio.FIRST_COMPLETED)
            if not life.ready.done():
                # the process's last message may still be on the way
                await asyncio.wait((life.ready,), timeout=LAST_WORDS)
        failed = life.ready.exception() if life.ready.done() else None
        if life.ready.done() and failed is None and not first.done():
            first.set_result(None)
        code = await ended
        del self._lives[life.number]
        self._changed.set()
        for front in self._fronts:
            front(Ended(life.number, code))
        if isinstance(failed, PenstockError):
            return failed
        if not life.ready.done():
            return EngineError(f"the engine's process {how_ended(code)} while it loaded")
        if life.leaving and code == 0:
            return None
        return EngineError(life.why or f"its process {how_ended(code)}")

    # --- restarting all replicas, one at a time

    async def _roll(self) -> None:
        """Restarts all replicas, one at a time, each while another serves; stops if one doesn't
        come back."""
        for replica in range(self.count):
            before = self._now[replica]
            if before is None or not before.serves:
                continue  # the replica is restarting already
            await self._until(partial(self._another_serves, replica))
            before.leaving = True
            for front in self._fronts:
                front(Leave(before.number))
            await self._until(partial(self._is_decided, replica, before))
            if not self._came_back(replica):
                self._say(f"replica {replica} did not come back: the others are not restarted")
                return
        self._say("all replicas were restarted")

    def _another_serves(self, replica: int) -> bool:
        others = self._now[:replica] + self._now[replica + 1 :]
        return any(life is not None and life.serves for life in others)

    def _is_decided(self, replica: int, before: _Life) -> bool:
        """Returns True if the process that was started after `before` is ready or has failed."""
        now = self._now[replica]
        return (
            now is not before
            and now is not None
            and (now.ready.done() or now.process.returncode is not None)
        )

    def _came_back(self, replica: int) -> bool:
        now = self._now[replica]
        return now is not None and now.serves

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    # --- ending the engines

    def retire(self) -> None:
        """Stops restarting replicas, since the service ends."""
        self._retired = True

    async def end(self, hurry: asyncio.Event | None = None) -> None:
        """Waits until the engines end, which they do once no client (front) uses them. Leaves no
        process running. Engines still loading are killed. hurry: once set, the others get HURRIED
        seconds."""
        self.retire()
        for task in (*self._keeping, *filter(None, [self._rolling])):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, PenstockError):
                await task
        for life in self._lives.values():
            if not life.ready.done() and life.process.returncode is None:
                life.process.kill()
        processes, hurry = self.processes, hurry or asyncio.Event()
        ending = asyncio.gather(*(process.wait() for process in processes))
        hurried = asyncio.ensure_future(hurry.wait())
        await asyncio.wait(
            (ending, hurried), timeout=END_PATIENCE, return_when=asyncio.FIRST_COMPLETED
        )
        if hurried.done():
            await asyncio.wait((ending,), timeout=HURRIED)
        hurried.cancel()
        self.kill()
        await ending

    def kill(self) -> None:
        """Kills all engine processes at once."""
        for process in self.processes:
            if process.returncode is None:
                process.kill()

    def _say(self, line: str) -> None:
        print(f"penstock: {line}", file=sys.stderr, flush=True)
