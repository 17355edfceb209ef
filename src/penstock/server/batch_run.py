"""One batch from wherever it stands to its end: check the lines, run those without a result, name the files.

    validating --bad lines--> failed
        └─> in_progress --all lines done--> finalizing --files named--> completed
                 └─cancel─> cancelling ------------------files named--> cancelled

Each arrow is one transaction of the store, taken after what it says is on the disk; so a kill at any moment leaves a
batch that this file takes up again. A disk that is full or fails holds a batch up, it doesn't end it. It knows the
state folder; lines are batch_compute's, HTTP and who asked are others'.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from penstock.errors import CapacityError, EngineError, JournalError, PenstockError
from penstock.server.batch_call import outcome_of_killer
from penstock.server.batch_compute import Compute, Tools
from penstock.server.batch_lines import Check, survey
from penstock.server.batch_results import ERRORS, OUTPUT, Results
from penstock.server.batch_shelf import new_file_id
from penstock.server.batch_state import State
from penstock.server.batch_store import BatchRow, FileRow, encoded
from penstock.server.refusals import ShuttingDownError

CAREFUL_AFTER = 2  # deaths of the engine, without a line done between them
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a failed write is tried again
RATE_SPAN = 60.0  # seconds that the measured rate looks back

Result = TypeVar("Result")


class DamagedError(Exception):
    """What a batch wrote is not what its journals say; computing on would mix it with something else."""


class BatchRun:
    """One batch. `run` ends when the batch is over, or is cancelled from outside when the server ends."""

    def __init__(self, tools: Tools, state: State, row: BatchRow) -> None:
        self._tools, self._state, self._row = tools, state, row
        self.stopped = asyncio.Event()  # set when a client has cancelled the batch
        self._ending = asyncio.Event()  # the server ends
        self._seen: deque[tuple[float, int]] = deque()  # (when, lines done)
        self.completed, self.failed = row.completed, row.failed
        if row.status == "cancelling":
            self.stopped.set()

    @property
    def id(self) -> str:
        return self._row.id

    def end(self) -> None:
        """The server ends: nothing is tried again. Whoever says it cancels `run` next."""
        self._ending.set()

    @property
    def expected_end(self) -> int | None:
        """Unix seconds, by the rate of the last minute; None where nothing is known yet."""
        if len(self._seen) < 2 or self.stopped.is_set():
            return None
        (first, before), (last, done) = self._seen[0], self._seen[-1]
        if done == before:
            return None
        left = (self._row.total - done) * (last - first) / (done - before)
        return round(time.time() - (time.monotonic() - last) + left)

    async def run(self) -> None:
        """Raises EngineError where the engine is gone: the batch stays where it is."""
        try:
            await self._run()
        except (EngineError, ShuttingDownError):
            raise
        except Exception as error:  # noqa: BLE001 - one batch's fault is not the server's end
            print(f"penstock: {self.id} failed by a fault of the server:", file=sys.stderr)
            traceback.print_exception(error)
            await self._fail("internal", "the server failed at this batch; its log says how")

    async def _run(self) -> None:
        if self._row.status == "validating" and not await self._validate():
            return
        try:
            if not self._named:
                await self._fill()
            await self._finish()
        except DamagedError as error:
            print(f"penstock: {self.id} cannot go on: {error.__cause__ or error}", file=sys.stderr)
            await self._fail("state_damaged", "what this batch had written was damaged: make the batch again")

    @property
    def _named(self) -> bool:
        """Whether the results are closed and have ids; all that is left is to name the files."""
        row = self._row
        return row.status == "finalizing" or row.output_file_id is not None or row.error_file_id is not None

    # --- the arrows

    async def _validate(self) -> bool:
        """Whether there is something to go on with."""
        limits, service = self._tools.limits, self._tools.caller.service
        path = self._state.shelf.path(self._row.input_file_id)
        check = Check(self._row.endpoint, service.model, service.client.facts, limits)
        found = await survey(path, check, limits)
        if found.errors:
            errors = encoded({"object": "list", "data": found.errors})
            if await self._move(("validating",), "failed", errors=errors):
                return False
        else:
            await self._move(("validating",), "in_progress", total=found.lines)
        await self._look()  # where a client cancelled it meanwhile, it is cancelling
        return True

    async def _fill(self) -> None:
        """Every line gets its result; the results are closed, and get ids."""
        folder = await self._insist(lambda: self._state.attempt(self._state.shelf.batch_folder, self.id))
        try:
            results = await self._insist(lambda: asyncio.to_thread(Results, folder, self.id))
        except JournalError as error:
            raise DamagedError from error
        try:
            await self._count(results)
            if not self.stopped.is_set():
                await self._compute(results)
        finally:
            await self._save(results.close)
        await self._name(results)

    async def _compute(self, results: Results) -> None:
        careful = await self._blame(results)
        path, counted = self._state.shelf.path(self._row.input_file_id), partial(self._count, results)
        begun = results.completed + results.failed
        killers: list[str | None] = [None]

        async def compute() -> None:
            run = Compute(self._tools, path, results, self._save, counted, careful=careful)
            try:
                await run.run(self.stopped)
            finally:
                killers[0] = run.killer

        try:
            await self._insist(compute)
        except EngineError:
            if not self._ending.is_set():
                await self._note_death(killers[0], results.completed + results.failed > begun)
            raise

    async def _blame(self, results: Results) -> bool:
        """Whether lines have to run one at a time. A line with which the engine died twice while it ran alone gets its
        outcome: the batch, and the server, go on without it."""
        row = self._row
        if row.suspect is None or results.has(row.suspect):
            return row.deaths >= CAREFUL_AFTER
        if row.suspect_deaths < 2:
            return True
        await self._save(partial(results.put, [outcome_of_killer(row.suspect)]))
        await self._count(results)
        return row.deaths >= CAREFUL_AFTER

    async def _note_death(self, killer: str | None, progress: bool) -> None:
        """Remembers with what the engine died, for the server that is started next."""
        row = self._row
        values: dict[str, Any] = {"deaths": 0 if progress else row.deaths + 1}
        if killer is not None:
            times = row.suspect_deaths + 1 if killer == row.suspect else 1
            values |= {"suspect": killer, "suspect_deaths": times}
        with contextlib.suppress(sqlite3.Error, OSError):  # it is noted at the next one
            await self._state.attempt(self._state.store.note, self.id, **values)

    async def _name(self, results: Results) -> None:
        """Closed results get the ids that their files will have."""
        values: dict[str, Any] = {"completed": results.completed, "failed": results.failed}
        values["output_file_id"] = new_file_id() if results.completed else None
        values["error_file_id"] = new_file_id() if results.failed else None
        if not await self._move(("in_progress",), "finalizing", **values):
            await self._insist(lambda: self._state.attempt(self._state.store.note, self.id, **values))
        await self._look()

    async def _finish(self) -> None:
        """Names the files; then they are there and the batch is over, in one transaction."""
        row, shelf = self._row, self._state.shelf
        folder = await self._insist(lambda: self._state.attempt(shelf.batch_folder, self.id))
        files = []
        for file_id, name in ((row.output_file_id, OUTPUT), (row.error_file_id, ERRORS)):
            if file_id is not None:
                size = await self._insist(partial(self._state.attempt, shelf.adopt, folder / name, file_id))
                made = FileRow(
                    id=file_id, owner=row.owner, created_at=int(time.time()), filename=f"{self.id}_{name}",
                    purpose="batch_output", bytes=size,
                )  # fmt: skip
                files.append(made)
        status = "cancelled" if row.status == "cancelling" else "completed"
        await self._insist(lambda: self._state.attempt(self._state.store.finish, self.id, status, files))
        await self._state.attempt(shelf.remove_batch, self.id)

    async def _fail(self, code: str, message: str) -> None:
        errors = {"object": "list", "data": [{"code": code, "line": None, "message": message, "param": None}]}
        await self._move(("validating", "in_progress", "finalizing", "cancelling"), "failed", errors=encoded(errors))

    # --- how

    async def _count(self, results: Results) -> None:
        """Shows what is on the disk; the database has it first, so that no later server shows less."""
        values = {"completed": results.completed, "failed": results.failed}
        try:
            await self._state.attempt(self._state.store.note, self.id, **values)
        except (sqlite3.Error, OSError):
            return  # the next one shows it; the journals are what counts
        self.completed, self.failed = results.completed, results.failed
        now = time.monotonic()
        self._seen.append((now, self.completed + self.failed))
        while len(self._seen) > 2 and now - self._seen[0][0] > RATE_SPAN:
            self._seen.popleft()

    async def _move(self, come_from: tuple[str, ...], status: str, **values: Any) -> bool:
        return await self._insist(
            lambda: self._state.attempt(self._state.store.move, self.id, come_from, status, **values)
        )

    async def _look(self) -> None:
        row = await self._insist(lambda: self._state.attempt(self._state.store.batch, self.id))
        assert row is not None, "a batch is never removed"
        self._row = row

    async def _save(self, write: Callable[[], None]) -> None:
        """A write of the journals, in a thread. Where the server ends it is tried once: rows are computed again."""
        try:
            await self._insist(lambda: asyncio.to_thread(write))
        except PenstockError as error:
            if not self._ending.is_set():
                raise
            print(f"penstock: {self.id} loses its last rows, and computes them again: {error}", file=sys.stderr)

    async def _insist(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """What `work` gives, tried until the disk lets it. Said once, however long it takes."""
        pause = 0.0
        while True:
            try:
                result = await work()
            except FileNotFoundError as error:  # nobody but us takes these files away
                raise DamagedError from error
            except (OSError, sqlite3.OperationalError, CapacityError, JournalError) as error:
                if self._ending.is_set() or (isinstance(error, JournalError) and error.__cause__ is None):
                    raise
                if not pause:
                    print(f"penstock: {self.id} waits for the state folder's disk ({_why(error)})", file=sys.stderr)
                pause = min(2 * pause, LONGEST_PAUSE) or FIRST_PAUSE
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), pause)
            else:
                if pause:
                    print(f"penstock: {self.id} goes on", file=sys.stderr)
                return result


def _why(error: Exception) -> str:
    """In a few words; of a journal's error its cause, since it tells the user of a command what to do."""
    cause = error.__cause__ if isinstance(error, PenstockError) and error.__cause__ is not None else error
    words = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return " ".join(words.split()).lower()
