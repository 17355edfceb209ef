"""BatchJob: runs one batch to its end. Checks the input's lines, computes the missing results, and
gives the result files their ids ("names" them).

    validating --no good line--> failed
        └─> in_progress --all lines done--> finalizing --files named--> completed
                └─cancel─> cancelling --all lines done---files named--> cancelled

Each arrow is one database transaction, which begins when its data is on the disk. So a kill at any
moment, or a failing disk (`run` raises), leaves a batch that can be resumed. A line "at the engine"
is one that was submitted and has not ended. Knows the folder of files
and batches (state_folder.py); the pipeline runs the lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
import traceback
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from penstock.errors import EngineError
from penstock.server.batch.database import BatchRow, FileRow
from penstock.server.batch.disk_errors import FileDamagedError, describe, is_damage, is_disk_fault
from penstock.server.batch.file_store import check_content, new_file_id
from penstock.server.batch.input_file import LineCheck, survey
from penstock.server.batch.line_request import NO_FAULTS
from penstock.server.batch.output_files import BatchOutput, adopt_output, error_list, with_fault
from penstock.server.batch.pipeline import BatchResources, Eta, Pipeline
from penstock.server.batch.poison_lines import PoisonLines
from penstock.server.batch.state_folder import StateFolder
from penstock.server.online.fair_semaphore import FairSemaphore
from penstock.server.openai.http_errors import ShuttingDownError


class BatchJob:
    """A batch that has not ended, and the task that runs it."""

    def __init__(self, shared: BatchResources, state: StateFolder, row: BatchRow) -> None:
        self._shared, self._state, self._row = shared, state, row
        self._input = state.file_store.path(row.input_file_id)
        self.cancelled = asyncio.Event()  # set when a client cancels the batch
        # True while the server ends. Errors may then come from that, so they don't end the batch.
        self.ending = False
        self.held_up = False  # True after a disk error, until the batch makes progress
        self._running: Pipeline | None = None  # None unless lines run at the engine
        self._unserved = self._at_work = False
        # code and message of the error that ends the batch
        self._failure: tuple[str, str] | None = None
        self._eta = Eta()
        self.completed, self.failed = row.completed, row.failed

    @property
    def id(self) -> str:
        return self._row.id

    @property
    def at_engine(self) -> bool:
        """True if lines are at the engine. The batch then notices the engine's death itself, and
        must record which lines were there."""
        return self._running is not None

    @property
    def expected_end(self) -> int | None:
        """Unix seconds of the expected end, from the rate of the last minute and the scheduler's
        forecast. None while unknown, and after a disk error."""
        if self.cancelled.is_set() or self.held_up:
            return None
        if self._running is None:
            return self._eta.expected_end(self._row.total)
        forecast = self._shared.lines.service.client.stats().get("expected_seconds_left", 0.0)
        return self._eta.expected_end(self._row.total, forecast, self._running.in_flight)

    @property
    def waits_for(self) -> str | None:
        """Reason why the batch waits: "disk" (an error of the disk with the batches' files),
        "model" (the server has another model than the batch), "turn" (other batches run). None
        while it runs."""
        if self.held_up:
            return "disk"
        if self._unserved:
            return "model"
        return None if self._at_work else "turn"

    def hold_up(self, error: BaseException) -> None:
        """Marks the batch as waiting for the disk. Prints the error, but only once until the batch
        makes progress."""
        if not self.held_up:
            print(
                f"penstock: {self.id} waits for the state folder's disk ({describe(error)}): see to"
                f" it, and make room in {self._state.folder} where it is full; it is tried again"
                " until it works",
                file=sys.stderr,
            )
        self.held_up = True

    def _goes_on(self) -> None:
        if self.held_up:
            print(f"penstock: {self.id} goes on", file=sys.stderr)
        self.held_up = False

    async def run(self) -> None:
        """Runs the batch to its end. Waits for its turn, and forever if this server has another
        model than the batch. Raises EngineError, ShuttingDownError and disk errors; the batch then
        keeps its state, and a later run resumes it. Any other error ends the batch, not the server.
        """
        if self._failure is None:
            try:
                await self._advance()
            except (EngineError, ShuttingDownError, *NO_FAULTS):
                raise
            except BaseException as error:
                # catches BaseException, since a panic in a Rust library is no Exception
                if self.ending or is_disk_fault(error):
                    raise
                self._failure = self._judge(error)
        if self._failure is not None:
            await self._fail(*self._failure)
        self._goes_on()

    async def _advance(self) -> None:
        await self._look()
        await self._until_served()
        if self._row.status == "validating":
            async with self._slot(self._shared.checks):
                await self._validate()
        if not self._row.over:
            async with self._slot(self._shared.places):
                if not self._named:
                    await self._fill()
                await self._finish()

    @contextlib.asynccontextmanager
    async def _slot(self, places: FairSemaphore) -> AsyncIterator[None]:
        """Holds a place of `places` during the block. A cancelled batch has nothing to run, so it
        enters without a place."""
        async with places.slot(self._row.owner, self.cancelled):
            self._at_work = True
            try:
                yield
            finally:
                self._at_work = False

    async def _until_served(self) -> None:
        """If this server has another model than the batch, waits until the batch is cancelled; a
        later server may have its model. Returns at once if only the files must be named, since that
        needs no model."""
        if (
            self._model == self._shared.lines.service.model
            or self._named
            or self.cancelled.is_set()
        ):
            return
        print(f"penstock: {self.id} waits for a server of {self._model}", file=sys.stderr)
        self._unserved = True
        await self.cancelled.wait()
        self._unserved = False

    @property
    def _named(self) -> bool:
        """True if the results are complete and have file ids,
        so that only the files must be moved."""
        row = self._row
        return (
            row.status == "finalizing"
            or row.output_file_id is not None
            or row.error_file_id is not None
        )

    @property
    def _model(self) -> str:
        return self._row.model or self._shared.lines.service.model

    def _new_check(self) -> LineCheck:
        """Returns a line check with the batch's own model and endpoint, so that it gives the same
        results as the first check."""
        facts = self._shared.lines.service.client.facts
        return LineCheck(self._row.endpoint, self._model, facts, self._shared.limits)

    # --- the work of each status (the arrows above)

    async def _validate(self) -> None:
        """Checks all lines. The batch goes on if any line is good. If it was cancelled before, no
        errors are listed."""
        if not self.cancelled.is_set():
            await self._check_input()
            found = await survey(self._input, self._new_check(), self._shared.limits)
            values: dict[str, Any] = {"errors": error_list(found.errors) if found.errors else None}
            if found.good:
                values |= {"total": found.lines, "model": self._model}
            await self._move("validating", "in_progress" if found.good else "failed", **values)
        # the status becomes `cancelling` if a client cancelled the batch meanwhile
        await self._look()

    async def _fill(self) -> None:
        """Computes every line's result, closes the result journals and assigns the result files'
        ids. Raises FileDamagedError if the input has changed since the check, since lines would be
        lost silently."""
        checked = self._row.in_progress_at is not None
        if checked:
            await self._check_input()
        output = await self._open_output()
        try:
            await self._count(output)
            if not self.cancelled.is_set():
                await self._run_lines(output)
            if self.cancelled.is_set() and checked:
                await self._pipeline(output, cancelled=True).run(asyncio.Event())
        finally:
            await asyncio.to_thread(output.close)
        if (done := output.completed + output.failed) != self._row.total:
            raise FileDamagedError(f"{done} of its {self._row.total} lines were found")
        await self._name(output)

    async def _open_output(self) -> BatchOutput:
        folder = await self._state.attempt(self._state.file_store.batch_folder, self.id)
        return await asyncio.to_thread(BatchOutput, folder, self.id)

    async def _check_input(self) -> None:
        """Raises FileDamagedError if the input on the disk differs from the uploaded file."""
        row = await self._state.attempt(
            self._state.database.file, self._row.input_file_id, self._row.owner
        )
        if row is None:
            raise FileDamagedError("it is not there")
        await asyncio.to_thread(check_content, self._input, row.bytes, row.sha256)

    def _pipeline(
        self, output: BatchOutput, suspects: str | None = None, *, cancelled: bool = False
    ) -> Pipeline:
        return Pipeline(
            self._shared,
            self._input,
            self._new_check,
            output,
            partial(self._count, output),
            suspects=PoisonLines(suspects),
            owner=self._row.owner,
            cancelled=cancelled,
        )

    async def _run_lines(self, output: BatchOutput) -> None:
        """Runs lines until all are done or the batch is cancelled. If the engine dies, records
        which lines it was running, for the next start."""
        self._running = running = self._pipeline(output, self._row.suspects)
        try:
            await running.run(self.cancelled)
        finally:
            if running.evidence:
                suspects = running.suspects.with_death(running.evidence)
                # if this fails, they are recorded at the engine's next death
                with contextlib.suppress(sqlite3.Error, OSError):
                    await self._state.attempt(self._state.database.note, self.id, suspects=suspects)
            self._running = None

    async def _name(self, output: BatchOutput) -> None:
        """Assigns the ids that the result files will have."""
        values: dict[str, Any] = {"completed": output.completed, "failed": output.failed}
        values["output_file_id"] = new_file_id() if output.completed else None
        values["error_file_id"] = new_file_id() if output.failed else None
        if not await self._move("in_progress", "finalizing", **values):
            await self._state.attempt(self._state.database.note, self.id, **values)
        await self._look()

    async def _finish(self) -> None:
        """Moves the results to the file store. In one transaction the files appear and the batch
        ends."""
        state, row = self._state, self._row
        status = "completed" if row.completed + row.failed == row.total else "failed"
        if row.status == "cancelling":
            status = "cancelled"
        files = await state.attempt(adopt_output, state.file_store, self._row)
        await state.attempt(state.database.finish, self.id, status, files)
        await state.attempt(state.file_store.remove_batch, self.id)

    # --- errors that end a batch

    def _judge(self, error: BaseException) -> tuple[str, str]:
        """Returns code and message of the error that ended the batch, and prints it for the
        operator."""
        if isinstance(error, FileDamagedError):
            print(f"penstock: {self.id} cannot go on: of its input, {error}", file=sys.stderr)
            return "file_damaged", f"of the batch's input: {error}"
        if is_damage(error):
            print(f"penstock: {self.id} cannot go on: {error.__cause__ or error}", file=sys.stderr)
            message = (
                "what the server kept of this batch was damaged: upload the file and make the batch"
                " again"
            )
            return "state_damaged", message
        print(f"penstock: {self.id} failed by a fault of the server:", file=sys.stderr)
        traceback.print_exception(error)
        return "internal", "the server failed at this batch; its log says how"

    async def _fail(self, code: str, message: str) -> None:
        """Ends the batch with an error of the server or the disk. Its owner still gets the results
        so far, unless they are damaged."""
        state, files = self._state, list[FileRow]()
        if code != "state_damaged" and self._row.in_progress_at is not None:
            try:
                files = await self._named_rows()
            except Exception as error:
                if self.ending or is_disk_fault(error):
                    raise
                # storing the results may fail in the same way
                print(
                    f"penstock: {self.id} leaves its rows in the state folder ({describe(error)})",
                    file=sys.stderr,
                )
        row = await state.attempt(state.database.batch, self.id)
        columns: dict[str, Any] = {
            "errors": with_fault(None if row is None else row.errors, code, message)
        }
        if not files:
            columns |= {"output_file_id": None, "error_file_id": None}
        await state.attempt(state.database.finish, self.id, "failed", files, **columns)

    async def _named_rows(self) -> list[FileRow]:
        """Closes and names the results so far; returns their files. A kill before the batch's end
        leaves it `finalizing`; `_finish` then sees from the counts that it failed."""
        if not self._named:
            output = await self._open_output()
            await asyncio.to_thread(output.close)
            await self._name(output)
        return await self._state.attempt(adopt_output, self._state.file_store, self._row)

    # --- helpers: counts, and statuses in the database

    async def _count(self, output: BatchOutput) -> None:
        """Publishes the numbers of results on the disk. Writes them to the database first, so that
        they never decrease after a restart."""
        values = {"completed": output.completed, "failed": output.failed}
        await self._state.attempt(self._state.database.note, self.id, **values)
        if output.completed + output.failed > self.completed + self.failed:
            self._goes_on()
        self.completed, self.failed = output.completed, output.failed
        self._eta.note(self.completed + self.failed)

    async def _move(self, come_from: str, status: str, **values: Any) -> bool:
        moved = await self._state.attempt(
            self._state.database.move, self.id, (come_from,), status, **values
        )
        if moved:
            self._goes_on()
        return moved

    async def _look(self) -> None:
        row = await self._state.attempt(self._state.database.batch, self.id)
        assert row is not None, "no batch is ever removed"
        row.errors = None  # frees memory, since a thousand batches may wait here
        self._row = row
        if row.status == "cancelling":
            self.cancelled.set()
