"""The desk: all batches of a server. It takes up those that a kill left, starts new ones, stops and reports them.

Each is checked as soon as it is there. A few run side by side and share the engine's room; the others wait their turn
in the status that they have. It knows runs and the state folder; no HTTP.
"""

from __future__ import annotations

import asyncio
import sys
import traceback

from penstock.errors import EngineError
from penstock.server.batch.batch_job import BatchJob
from penstock.server.batch.database import BatchRow
from penstock.server.batch.fair_semaphore import Gate
from penstock.server.batch.fair_slots import Turns
from penstock.server.batch.input_file import BatchLimits
from penstock.server.batch.line_request import NO_FAULTS, LinePreparer
from penstock.server.batch.pipeline import BatchResources
from penstock.server.batch.state_folder import StateFolder
from penstock.server.online.app_state import AppState
from penstock.server.openai.http_errors import ShuttingDownError

AT_ONCE = 8  # batches that run side by side
CHECKED_AT_ONCE = 2  # batches whose lines are checked side by side
GATE_BYTES = 256 << 20  # of lines at the engine, their texts and ids: six million tokens
HEARD_WITHIN = 1.0  # seconds; an engine's client tells of its death 0.2 s after that, and a disk takes a note
DISK_SECONDS = 10.0  # that a disk gets at the end to take what is done
DISK_SECONDS_DEAD = 2.0  # as much, where the engine died and the process has to end soon
HURRIED = 0.5  # seconds that are left to it once the end is to be now
AHEAD = 8  # one row in so many: sequences at the engine beyond its rows, so that it never waits for us


class BatchManager:
    """Runs the batches of one state folder."""

    def __init__(self, service: AppState, state: StateFolder, limits: BatchLimits | None = None) -> None:
        limits = limits or BatchLimits()
        rows = service.client.facts.max_num_seqs
        self.state, self.limits = state, limits
        self.model, self.body_seconds = service.model, service.limits.body_seconds
        self.arrivals = service.body_timeouts
        self._tools = BatchResources(LinePreparer(service), Gate(rows + max(8, rows // AHEAD), GATE_BYTES), limits)
        self._checks, self._turns = Turns(CHECKED_AT_ONCE), Turns(AT_ONCE)
        self._ended = False
        self._runs: dict[str, BatchJob] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def go_on(self) -> None:
        """Takes up what an earlier server left. Raises StorageError."""
        for row in await self.state.call(self.state.store.unfinished):
            self.start(row)

    def start(self, row: BatchRow) -> None:
        """Runs a batch that is in the store, once, whether who made it says so or `go_on`, whose look came just after
        that; where the server ends, the next one does."""
        if self._ended or row.id in self._runs:
            return
        self._runs[row.id] = run = BatchJob(self._tools, self.state, row)
        self._tasks[row.id] = task = asyncio.create_task(self._turn(run))
        task.add_done_callback(lambda _: self._forget(row.id))

    def run_of(self, batch_id: str) -> BatchJob | None:
        """The run of a batch that isn't over."""
        return self._runs.get(batch_id)

    async def end(self, hurry: asyncio.Event | None = None, *, died: bool = False) -> None:
        """Stops all runs where they are; a start with the same folder goes on with them. Files are still served.

        died: the engine did; those with lines there hear of it by themselves, a little later than the process's end is
        seen, and remember it. A disk that takes too long is not waited for, and not much longer once `hurry` is set.
        """
        self._ended = True
        hurry = hurry or asyncio.Event()
        tasks = dict(self._tasks)
        hearing = {tasks[run.id] for run in self._runs.values() if died and run.at_engine}
        self._stop(set(tasks.values()) - hearing)
        await _wait(hearing, hurry, HEARD_WITHIN)
        self._stop(hearing)
        left = await _wait(set(tasks.values()), hurry, DISK_SECONDS_DEAD if died else DISK_SECONDS)
        if left:
            message = "the state folder's disk takes too long: what it hasn't got is computed again"
            print(f"penstock: {message} ({left} of the batches)", file=sys.stderr)

    def _stop(self, tasks: set[asyncio.Task[None]]) -> None:
        for batch_id, task in self._tasks.items():
            if task in tasks:
                self._runs[batch_id].end()
                task.cancel()

    async def _turn(self, run: BatchJob) -> None:
        """A batch from start to end; one that is cancelled has nothing to run and waits for no place."""
        try:
            await run.until_served()
            if run.unchecked:
                async with self._checks.of(run.owner, run.stopped):
                    await run.check()
            if not run.over:
                async with self._turns.of(run.owner, run.stopped):
                    await run.run()
        except (EngineError, ShuttingDownError):
            pass  # the server ends and says why; the batch goes on with the next one
        except NO_FAULTS:
            raise
        except BaseException as error:  # noqa: BLE001 - not even its failure could be written down: said, and left
            print(f"penstock: {run.id} stands still until the next start:", file=sys.stderr)
            traceback.print_exception(error)

    def _forget(self, batch_id: str) -> None:
        self._runs.pop(batch_id, None)
        self._tasks.pop(batch_id, None)


async def _wait(tasks: set[asyncio.Task[None]], hurry: asyncio.Event, seconds: float) -> int:
    """Until all have ended, for so many seconds at most, and HURRIED once `hurry` is set; how many have not."""
    if not tasks:
        return 0
    ended, hurried = asyncio.ensure_future(asyncio.wait(tasks)), asyncio.ensure_future(hurry.wait())
    try:
        await asyncio.wait((ended, hurried), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if hurried.done():
            await asyncio.wait((ended,), timeout=min(seconds, HURRIED))
    finally:
        ended.cancel()
        hurried.cancel()
    return sum(not task.done() for task in tasks)
