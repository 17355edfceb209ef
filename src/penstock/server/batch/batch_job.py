"""One batch from wherever it stands to its end: check the lines, give those without a result one, name the files.

    validating --no good line--> failed
        └─> in_progress --all lines done--> finalizing --files named--> completed
                 └─cancel─> cancelling --all told---------files named--> cancelled

Each arrow is one transaction of the store, taken after what it says is on the disk; so a kill at any moment leaves a
batch that this file takes up again. A disk that is full or fails holds a batch up, it doesn't end it. It knows the
state folder; lines are pipeline's, HTTP and who asked are others'.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from penstock.errors import EngineError, JournalError
from penstock.server.batch.database import BatchRow, FileRow
from penstock.server.batch.disk_retry import DamagedError, Patience, why
from penstock.server.batch.eta import Eta
from penstock.server.batch.file_store import FileDamagedError, check_content, new_file_id
from penstock.server.batch.finalize import NO_FILES, adopted, lent, listed, with_fault
from penstock.server.batch.input_file import LineCheck, survey
from penstock.server.batch.line_request import NO_FAULTS
from penstock.server.batch.output_files import BatchOutput
from penstock.server.batch.pipeline import BatchResources, Pipeline
from penstock.server.batch.poison_lines import PoisonLines
from penstock.server.batch.state_folder import StateFolder
from penstock.server.openai.http_errors import ShuttingDownError


class BatchJob:
    """One batch: `until_served`, `check`, `run`, one after the other. It is over then, unless it was cancelled from
    outside when the server ends. The last two raise EngineError where the engine is gone: the batch stays where it
    is."""

    def __init__(self, tools: BatchResources, state: StateFolder, row: BatchRow) -> None:
        self._tools, self._state, self._row = tools, state, row
        self._input = state.shelf.path(row.input_file_id)
        self.stopped = asyncio.Event()  # set when a client has cancelled the batch
        self._disk = Patience(row.id, state.folder)
        self._running: Pipeline | None = None  # while lines are at the engine
        self._unserved = self._at_work = False
        self._progress = Eta()
        self.completed, self.failed = row.completed, row.failed
        if row.status == "cancelling":
            self.stopped.set()

    @property
    def id(self) -> str:
        return self._row.id

    @property
    def owner(self) -> str:
        return self._row.owner

    @property
    def over(self) -> bool:
        return self._row.over

    @property
    def unchecked(self) -> bool:
        return self._row.status == "validating"

    @property
    def at_engine(self) -> bool:
        """Whether it hears by itself of the engine's end, and has to remember which lines were there."""
        return self._running is not None

    @property
    def expected_end(self) -> int | None:
        """Unix seconds, by the rate of the last minute and the scheduler's forecast; None where nothing is known: not
        yet, or not while the disk holds it up."""
        if self.stopped.is_set() or self._disk.waits:
            return None
        if self._running is None:
            return self._progress.expected_end(self._row.total)
        forecast = self._tools.caller.service.client.stats().get("expected_seconds_left", 0.0)
        return self._progress.expected_end(self._row.total, forecast, self._running.there)

    @property
    def waits_for(self) -> str | None:
        """What holds it up, in a word: the state folder's disk, that this server has another model, or that others
        have all places; None while it goes on."""
        if self._disk.waits:
            return "disk"
        if self._unserved:
            return "model"
        return None if self._at_work else "turn"

    def end(self) -> None:
        """The server ends: nothing is tried again. Whoever says it cancels `run` next."""
        self._disk.end()

    async def until_served(self) -> None:
        """Waits, where this server has another model than the batch's, until a cancel: a later server may have it. What
        only has to be named needs no model."""
        model = self._model
        if model == self._tools.caller.service.model or self._named or self.stopped.is_set():
            return
        print(f"penstock: {self.id} waits for a server of {model}", file=sys.stderr)
        self._unserved = True
        await self.stopped.wait()
        self._unserved = False

    async def check(self) -> None:
        """Says which lines are bad; the batch goes on if any is good."""
        await self._guarded(self._validate)

    async def run(self) -> None:
        await self._guarded(self._run)

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """One batch's fault is not the server's end."""
        self._at_work = True
        try:
            await work()
        except (EngineError, ShuttingDownError):
            raise
        except DamagedError as error:
            print(f"penstock: {self.id} cannot go on: {error.__cause__ or error}", file=sys.stderr)
            message = "what the server kept of this batch was damaged: upload the file and make the batch again"
            await self._fail("state_damaged", message)
        except FileDamagedError as error:
            if self._disk.ended:  # as below
                raise
            print(f"penstock: {self.id} cannot go on: of its input, {error}", file=sys.stderr)
            await self._fail_with_rows("file_damaged", f"of the batch's input: {error}")
        except NO_FAULTS:
            raise
        except BaseException as error:  # what a library in Rust raises when it panics, too
            if self._disk.ended:  # it may be the end's doing: the next start finds out
                raise
            print(f"penstock: {self.id} failed by a fault of the server:", file=sys.stderr)
            traceback.print_exception(error)
            await self._fail_with_rows("internal", "the server failed at this batch; its log says how")
        finally:
            self._at_work = False

    async def _run(self) -> None:
        if not self._named:
            await self._fill()
        await self._finish()

    @property
    def _named(self) -> bool:
        """Whether the results are closed and have ids; all that is left is to name the files."""
        row = self._row
        return row.status == "finalizing" or row.output_file_id is not None or row.error_file_id is not None

    @property
    def _model(self) -> str:
        return self._row.model or self._tools.caller.service.model

    def _new_check(self) -> LineCheck:
        """It judges as the first one did, whatever is served now."""
        facts = self._tools.caller.service.client.facts
        return LineCheck(self._row.endpoint, self._model, facts, self._tools.limits)

    # --- the arrows

    async def _validate(self) -> None:
        """One that a client cancels before its lines were told stays without any."""
        if not self.stopped.is_set():
            await self._check_input()
            found = await self._disk.insist(lambda: survey(self._input, self._new_check(), self._tools.limits))
            told: dict[str, Any] = {"errors": listed(found.errors) if found.errors else None}
            if found.good:
                told |= {"total": found.lines, "model": self._model}
            await self._move(("validating",), "in_progress" if found.good else "failed", **told)
        await self._look()  # where a client cancelled it meanwhile, it is cancelling

    async def _fill(self) -> None:
        """Every line gets its result; the results are closed, and get ids. Raises FileDamagedError where the input has
        changed since it was checked: lines would be lost without a word."""
        checked = self._row.in_progress_at is not None
        if checked:
            await self._check_input()
        folder = await self._disk.insist(lambda: self._state.attempt(self._state.shelf.batch_folder, self.id))
        try:
            results = await self._disk.insist(lambda: asyncio.to_thread(BatchOutput, folder, self.id))
        except JournalError as error:
            raise DamagedError from error
        try:
            await self._count(results)
            if not self.stopped.is_set():
                await self._compute(results)
            if self.stopped.is_set() and checked:
                await self._disk.insist(lambda: self._computing(results, cancelled=True).run(asyncio.Event()))
        finally:
            await self._disk.save(results.close)
        if (done := results.completed + results.failed) != self._row.total:
            raise FileDamagedError(f"{done} of its {self._row.total} lines were found")
        await self._name(results)

    async def _check_input(self) -> None:
        """Raises FileDamagedError where the input isn't what was uploaded."""

        async def check() -> None:
            row = await self._state.attempt(self._state.store.file, self._row.input_file_id, self.owner)
            if row is None:
                raise FileDamagedError("it is not there")
            await asyncio.to_thread(check_content, self._input, row.bytes, row.sha256)

        await self._disk.insist(check)

    def _computing(self, results: BatchOutput, suspects: str | None = None, *, cancelled: bool = False) -> Pipeline:
        return Pipeline(
            self._tools,
            self._input,
            self._new_check,
            results,
            self._disk.save,
            partial(self._count, results),
            suspects=PoisonLines(suspects),
            owner=self.owner,
            cancelled=cancelled,
        )

    async def _compute(self, results: BatchOutput) -> None:
        async def compute() -> None:
            self._running = self._computing(results, self._row.suspects)
            await self._running.run(self.stopped)

        try:
            await self._disk.insist(compute)
        finally:
            if self._running is not None and self._running.evidence:
                await self._note_death(self._running)
            self._running = None

    async def _note_death(self, running: Pipeline) -> None:
        """Remembers which lines were there when the engine died, for the server that is started next."""
        suspects = running.suspects.with_death(running.evidence)
        with contextlib.suppress(sqlite3.Error, OSError):  # it is noted at the next one
            await self._state.attempt(self._state.store.note, self.id, suspects=suspects)

    async def _name(self, results: BatchOutput) -> None:
        """Closed results get the ids that their files will have."""
        values: dict[str, Any] = {"completed": results.completed, "failed": results.failed}
        values["output_file_id"] = new_file_id() if results.completed else None
        values["error_file_id"] = new_file_id() if results.failed else None
        if not await self._move(("in_progress",), "finalizing", **values):
            await self._disk.insist(lambda: self._state.attempt(self._state.store.note, self.id, **values))
        await self._look()

    async def _finish(self) -> None:
        """Names the files; then they are there and the batch is over, in one transaction."""
        row, state = self._row, self._state
        files = await self._disk.insist(lambda: state.attempt(adopted, state.shelf, row))
        status = "cancelled" if row.status == "cancelling" else "completed"
        await self._disk.insist(lambda: state.attempt(state.store.finish, self.id, status, files))
        await state.attempt(state.shelf.remove_batch, self.id)

    async def _fail(self, code: str, message: str, files: Sequence[FileRow] = (), **columns: Any) -> None:
        """The end by a fault, of ours or the disk's."""
        state = self._state
        errors = await self._disk.insist(lambda: state.attempt(state.store.errors, self.id))
        values = {**NO_FILES, **columns, "errors": with_fault(errors, code, message)}
        await self._disk.insist(lambda: state.attempt(state.store.finish, self.id, "failed", files, **values))
        await self._look()

    async def _fail_with_rows(self, code: str, message: str) -> None:
        """By a fault of ours, or of the input on our disk: what is done is its owner's all the same."""
        files: Sequence[FileRow] = ()
        columns: dict[str, Any] = {}
        if self._row.in_progress_at is not None and not self._named:
            ids = (new_file_id(), new_file_id())  # the same ones, however often it is tried
            try:
                lend = partial(lent, self._state.shelf, self._row, ids)
                files, columns = await self._disk.insist(lambda: asyncio.to_thread(lend))
            except Exception as error:
                if self._disk.ended:
                    raise
                # The fault may show again in what it left.
                print(f"penstock: {self.id} leaves its rows in the state folder ({why(error)})", file=sys.stderr)
        await self._fail(code, message, files, **columns)

    # --- how

    async def _count(self, results: BatchOutput) -> None:
        """Shows what is on the disk; the database has it first, so that no later server shows less."""
        values = {"completed": results.completed, "failed": results.failed}
        try:
            await self._state.attempt(self._state.store.note, self.id, **values)
        except (sqlite3.Error, OSError):
            return  # the next one shows it; the journals are what counts
        self.completed, self.failed = results.completed, results.failed
        self._progress.note(self.completed + self.failed)

    async def _move(self, come_from: tuple[str, ...], status: str, **values: Any) -> bool:
        return await self._disk.insist(
            lambda: self._state.attempt(self._state.store.move, self.id, come_from, status, **values)
        )

    async def _look(self) -> None:
        row = await self._disk.insist(lambda: self._state.attempt(self._state.store.standing, self.id))
        assert row is not None, "a batch is removed long after its end, if ever"
        self._row = row
