"""The middle of a batch: lines without a result go to the engine, outcomes to the disk, until none
is left.

    input --check--> line --prepare--> room --> engine --> outbox --group commit--> journals, then
    counts

A kill at any line of this, or a disk that fails, costs what was not committed: it is computed
again. Lines with which the engine died before come behind the others (poison_lines). It knows
lines, room and journals; no database, no status.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from penstock.errors import EngineError
from penstock.server.batch.batch_limits import BatchJobLimits
from penstock.server.batch.input_file import LineCheck, verdicts
from penstock.server.batch.line_request import (
    LinePreparer,
    LineRequest,
    result_of_bad,
    result_of_cancelled,
    result_of_killer,
)
from penstock.server.batch.output_files import BatchOutput, LineOutcome
from penstock.server.batch.poison_lines import ALONE_FROM, FEW, FEW_FROM, PoisonLines
from penstock.server.online.app_state import AppState
from penstock.server.online.fair_semaphore import FairSemaphore
from penstock.server.openai.batch_line import BatchLine, LineError

AHEAD = (
    8  # one row in so many: sequences at the engine beyond its rows, so that it never waits for us
)
MORE_ROOM = (
    4  # times as much room, for a line that is tried again since there was none for its answer
)
MEAN_OF = 16  # lines, about, whose answers say how large the next ones may be
LARGE_AT_ONCE = 2  # large lines that wait for room, with all of their ids


class BatchResources:
    """What all batches of a server share. checks, places: batches that are checked, and run, at
    once. room: sequences and bytes of lines at the engine."""

    def __init__(self, service: AppState, limits: BatchJobLimits) -> None:
        rows = service.client.facts.max_num_seqs
        self.limits, self.lines = limits, LinePreparer(service)
        self.checks, self.places = (
            FairSemaphore(limits.checked_batches),
            FairSemaphore(limits.running_batches),
        )
        self.room = FairSemaphore(rows + max(8, rows // AHEAD), limits.in_flight_bytes)
        self.large = asyncio.Semaphore(LARGE_AT_ONCE)


class Pipeline:
    """Gives each line of `path` that `output` doesn't have its outcome. new_check: makes a check
    with the batch's own measure. counted: called each time that outcomes are on the disk. suspects:
    of earlier deaths. cancelled: good lines aren't run any more. owner: whose the rows are, in the
    engine's queue.

    evidence: once the engine has died, what that says against lines that were there, by their
    numbers."""

    def __init__(
        self,
        shared: BatchResources,
        path: Path,
        new_check: Callable[[], LineCheck],
        output: BatchOutput,
        counted: Callable[[], Awaitable[None]],
        *,
        suspects: PoisonLines,
        owner: str = "",
        cancelled: bool = False,
    ) -> None:
        self._shared, self._path, self._new_check = shared, path, new_check
        self._output, self._counted = output, counted
        self._outbox: asyncio.Queue[LineOutcome | None] = asyncio.Queue()  # None: no more will come
        self._owner, self._cancelled = owner, cancelled
        self._answer_bytes = 0.0  # of a sequence, in the mean
        self._kept = 0  # bytes of outcomes that are not on the disk
        self._stage = 0  # of the suspects, whose turn it is
        self._at_engine: dict[int, LineRequest] = {}  # by their lines' numbers
        self.suspects, self.evidence = suspects, dict[int, int]()

    @property
    def in_flight(self) -> int:
        """Lines at the engine."""
        return len(self._at_engine)

    async def run(self, stopped: asyncio.Event) -> None:
        """Runs until all lines have a result, or `stopped`. However it ends, what was computed is
        written first, if that can be. Raises EngineError where the engine died, and what the disk
        raises."""
        writing = asyncio.create_task(self._write())
        feeding = asyncio.create_task(self._feed())
        stopping = asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait((feeding, stopping, writing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _whole(self._end(writing, feeding, stopping))
        writing.result()
        if not feeding.cancelled():
            feeding.result()

    async def _end(self, writing: asyncio.Task[None], *others: asyncio.Task[Any]) -> None:
        for task in others:
            task.cancel()
        await asyncio.wait(others)
        self._outbox.put_nowait(None)
        await asyncio.wait((writing,))
        self._let_go(self._kept)

    async def _feed(self) -> None:
        """Brings every line to its outcome."""
        begun = time.monotonic()
        stage: int | None = 0
        while stage is not None:
            if stage >= ALONE_FROM:
                await asyncio.sleep(begun + self._shared.limits.settled_seconds - time.monotonic())
            self._stage = stage
            await self._pass()
            stage = self.suspects.stage_after(stage)

    async def _pass(self) -> None:
        """Does the same for all lines of this stage."""
        try:
            async with asyncio.TaskGroup() as rows:
                async for number, found in verdicts(
                    self._path, self._new_check(), self._shared.limits
                ):
                    if self._due(number, found):
                        await self._begin(rows, number, found)
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    def _due(self, number: int, found: BatchLine | LineError) -> bool:
        if self._output.has(number if found.custom_id is None else found.custom_id):
            self.suspects.forget(number)
            return False
        return self.suspects.stage(number) == self._stage

    async def _begin(
        self, rows: asyncio.TaskGroup, number: int, found: BatchLine | LineError
    ) -> None:
        """Brings a line to the engine, or its outcome to the outbox where that is known without."""
        if isinstance(found, LineError):
            await self._bring(result_of_bad(found, number))
        elif self._cancelled:
            await self._bring(result_of_cancelled(found.custom_id))
        elif self.suspects.is_killer(number):
            await self._bring(result_of_killer(found.custom_id))
        else:
            large = len(found.body) > self._shared.limits.large_line
            async with self._shared.large if large else contextlib.nullcontext():
                request = await self._shared.lines.prepare(found, self._owner)
                if isinstance(request, LineOutcome):
                    await self._bring(request)
                    return
                inside = asyncio.Event()
                rows.create_task(self._row(number, request, inside))
                await inside.wait()

    async def _row(self, number: int, request: LineRequest, inside: asyncio.Event) -> None:
        """Runs a line until it has its outcome; `inside` is set once it is at the engine, and the
        next one may come."""
        tries = 0
        while not await self._ran(number, request, tries, inside):
            tries += 1

    async def _ran(
        self, number: int, request: LineRequest, tries: int, inside: asyncio.Event
    ) -> bool:
        """Returns whether it has an outcome. Its room is free once that is in the outbox, so a slow
        disk slows the engine down; while many answers wait for the disk, no line is added."""
        room, answers = self._shared.room, self._shared.lines.answers
        weight = self._weight(request, tries)
        alone = tries > 0 and weight == room.capacity
        await room.acquire(*weight)
        try:
            await answers.until_kept(0 if alone else answers.most // 2)
            inside.set()
            self._at_engine[number] = request
            outcome = await request.outcome(alone=alone)
            if outcome is not None:
                self._answer_bytes += (
                    len(outcome.text) / request.sequences - self._answer_bytes
                ) / MEAN_OF
                await self._bring(outcome)
            return outcome is not None
        except EngineError:  # the first line that hears of it; the others are cancelled then
            if not self.evidence:
                found = {each: there.evidence() for each, there in self._at_engine.items()}
                self.evidence = {each: points for each, points in found.items() if points}
            raise
        finally:
            self._at_engine.pop(number, None)
            room.release(*weight)

    def _weight(self, request: LineRequest, tries: int) -> tuple[int, int]:
        """Returns how much of the room a line takes: its sequences, or more, so that if all of the
        room were full of answers twice as large as they are here, there would be memory for them.
        One that had none for its own takes more with each try, and all of the room in the end; so
        do suspects."""
        capacity, most = self._shared.room.capacity, self._shared.lines.answers.most
        share = max(1.0, 2 * self._answer_bytes * capacity[0] / most) * MORE_ROOM**tries
        sequences = math.ceil(request.sequences * share)
        if self._stage >= FEW_FROM:
            sequences = max(sequences, math.ceil(capacity[0] / FEW))
        if self._stage >= ALONE_FROM or (tries and sequences >= capacity[0]):
            return capacity
        return sequences, request.size

    async def _bring(self, outcome: LineOutcome) -> None:
        """Puts it into the outbox; it counts until it is on the disk, or given up with the whole of
        this. Who brings one waits while the disk has many before it."""
        size = len(outcome.text)
        self._kept += size
        self._shared.lines.answers.keep(size)
        self._outbox.put_nowait(outcome)
        await self._shared.lines.answers.until_kept(self._shared.limits.outbox_bytes)

    def _let_go(self, size: int) -> None:
        self._kept -= size
        self._shared.lines.answers.let_go(size)

    async def _write(self) -> None:
        """Brings outcomes to the disk, some at a time, until no more come."""
        last = False
        while not last:
            found = [await self._outbox.get()]
            if found[0] is not None:  # others come soon, and share its sync
                await asyncio.sleep(self._shared.limits.commit_seconds)
            while not self._outbox.empty():
                found.append(self._outbox.get_nowait())
            last = found[-1] is None
            if outcomes := [each for each in found if each is not None]:
                await asyncio.to_thread(self._output.put, outcomes)
                self._let_go(sum(len(outcome.text) for outcome in outcomes))
                await self._counted()


async def _whole(work: Coroutine[Any, Any, None]) -> None:
    """Runs work to its end; a cancel that comes amid it is raised then. Who waits for a thread that
    writes must not go while it writes."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    task.result()


RATE_SPAN = 60.0  # seconds that the measured rate looks back


class Eta:
    """Counts of lines done, and when they were."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()  # (when, lines done)

    def note(self, done: int) -> None:
        now = time.monotonic()
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[0][0] > RATE_SPAN:
            self._seen.popleft()

    def expected_end(self, total: int, forecast: float = 0.0, there: int = 0) -> int | None:
        """Unix seconds; None where nothing is known yet. The time since the last line counts: while
        the online load leaves a batch nothing, its end goes away.

        forecast: seconds until all that the engine has is done, as its scheduler expects, with
        `there` lines of this batch among it; those to come take as long, as many at once. Of rate
        and forecast the later end counts: long lines end in waves, and just behind one the rate is
        far too good; half done, they look too short to the other.
        """
        (first, before), (_, done) = (
            (self._seen[0], self._seen[-1]) if self._seen else ((0.0, 0), (0.0, 0))
        )
        seconds = [forecast * max((total - done) / there, 1.0)] if forecast and there else []
        if done > before:
            seconds.append((total - done) * (time.monotonic() - first) / (done - before))
        return round(time.time() + max(seconds)) if seconds else None
