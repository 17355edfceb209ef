"""Runs all batches of a server. Resumes unfinished ones, starts, stops and reports them. A few run
at the same time; a batch that hit a disk error runs again after a pause. Knows jobs and the state
folder; no HTTP."""

from __future__ import annotations

import asyncio
import sys
import traceback

from penstock.errors import EngineError
from penstock.server.batch.batch_job import BatchJob
from penstock.server.batch.batch_limits import BatchJobLimits
from penstock.server.batch.database import BatchRow
from penstock.server.batch.disk_errors import describe, is_disk_fault
from penstock.server.batch.line_request import NO_FAULTS
from penstock.server.batch.pipeline import BatchResources
from penstock.server.batch.state_folder import StateFolder
from penstock.server.online.app_state import AppState
from penstock.server.openai.http_errors import ShuttingDownError

LOOK_EVERY = 0.1  # seconds between two checks for a ready replica


class BatchManager:
    """Runs the batches whose files and database are in one folder."""

    def __init__(
        self, service: AppState, state: StateFolder, limits: BatchJobLimits | None = None
    ) -> None:
        self.state, self.limits = state, limits or BatchJobLimits()
        self.model, self.body_seconds = service.model, service.limits.body_seconds
        self.body_timeouts = service.body_timeouts
        self.shared = BatchResources(service, self.limits)
        self._ending = False
        self._jobs: dict[str, BatchJob] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def go_on(self) -> None:
        """Resumes the batches that an earlier server left unfinished. Raises StorageError."""
        for row in await self.state.call(self.state.database.unfinished):
            self.start(row)

    def start(self, row: BatchRow) -> None:
        """Runs a batch of the database. Does nothing if it runs already, since its creation and
        `go_on` may both start it, or if the server is ending."""
        if self._ending or row.id in self._jobs:
            return
        self._jobs[row.id] = job = BatchJob(self.shared, self.state, row)
        self._tasks[row.id] = task = asyncio.create_task(self._run(job))
        task.add_done_callback(lambda _: self._forget(row.id))

    def job_of(self, batch_id: str) -> BatchJob | None:
        """Returns the job of an unfinished batch, or None."""
        return self._jobs.get(batch_id)

    async def end(self, hurry: asyncio.Event | None = None, *, died: bool = False) -> None:
        """Stops all jobs. A server with the same folder resumes them. Files are still served. died:
        True if the engine died; jobs with lines at the engine then get a moment to notice that and
        to record it. The wait for the disk is limited, and cut short once `hurry` is set.
        """
        self._ending = True
        hurry, limits = hurry or asyncio.Event(), self.limits
        tasks = dict(self._tasks)
        hearing = {tasks[job.id] for job in self._jobs.values() if died and job.at_engine}
        self._stop(set(tasks.values()) - hearing)
        await self._wait(hearing, hurry, limits.death_notice)
        self._stop(hearing)
        seconds = limits.flush_seconds_dead if died else limits.flush_seconds
        left = await self._wait(set(tasks.values()), hurry, seconds)
        if left:
            message = "the state folder's disk takes too long: what it hasn't got is computed again"
            print(f"penstock: {message} ({left} of the batches)", file=sys.stderr)

    def _stop(self, tasks: set[asyncio.Task[None]]) -> None:
        for batch_id, task in self._tasks.items():
            if task in tasks:
                self._jobs[batch_id].ending = True
                task.cancel()

    async def _wait(
        self, tasks: set[asyncio.Task[None]], hurry: asyncio.Event, seconds: float
    ) -> int:
        """Waits up to `seconds`, or only a moment longer once `hurry` is set. Returns how many
        tasks haven't ended."""
        if not tasks:
            return 0
        ended, hurried = (
            asyncio.ensure_future(asyncio.wait(tasks)),
            asyncio.ensure_future(hurry.wait()),
        )
        try:
            await asyncio.wait(
                (ended, hurried), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if hurried.done():
                await asyncio.wait(
                    (ended,), timeout=min(seconds, self.limits.flush_seconds_hurried)
                )
        finally:
            ended.cancel()
            hurried.cancel()
        return sum(not task.done() for task in tasks)

    async def _run(self, job: BatchJob) -> None:
        """Runs a batch to its end, and runs it again after each disk error. The pause before that
        doubles each time, and is reset after progress."""
        pause = 0.0
        while True:
            try:
                await job.run()
                return
            except ShuttingDownError:
                return  # the next server resumes the batch
            except EngineError:
                if not await self._engines_go_on():
                    return  # the server ends and reports it; the next one resumes the batch
                continue
            except NO_FAULTS:
                raise
            except BaseException as error:  # noqa: BLE001 - logged, and the server goes on
                if not is_disk_fault(error):  # even the batch's failure could not be recorded
                    print(f"penstock: {job.id} stands still until the next start:", file=sys.stderr)
                    traceback.print_exception(error)
                    return
                if job.ending:
                    said = f"loses its last rows, and computes them again: {describe(error)}"
                    print(f"penstock: {job.id} {said}", file=sys.stderr)
                    return
                pause = (
                    min(2 * pause, self.limits.longest_pause)
                    if job.held_up
                    else self.limits.first_pause
                )
                job.hold_up(error)
            await asyncio.sleep(pause)

    async def _engines_go_on(self) -> bool:
        """Waits for a ready engine after one has died. Returns False if all engines are gone or the
        server ends."""
        client = self.shared.lines.service.client
        while not (client.alive or client.gone or self._ending):
            await asyncio.sleep(LOOK_EVERY)
        return client.alive and not self._ending

    def _forget(self, batch_id: str) -> None:
        self._jobs.pop(batch_id, None)
        self._tasks.pop(batch_id, None)
