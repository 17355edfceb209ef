"""Pipeline: runs a batch's lines on the engine. Submits lines without a result, and writes their
outcomes to the disk, until none is left.

    input --check--> line --prepare--> room --> engine --> outbox --group commit--> journals, then
    counts

"Room" is the semaphore that limits samples and bytes at the engine. A kill at any point, or a
failing disk, loses only uncommitted outcomes, which are computed again. Lines that were at the
engine when it died run after the others (poison_lines.py). Knows lines, room and journals; no
database, no status.
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

# one sample more than rows is submitted per this many rows, so that the engine never waits for the
# next line
AHEAD = 8
# factor by which a line's room grows at each retry, after there was no memory for its answer
MORE_ROOM = 4
MEAN_OF = 16  # number of lines, about, over which the size of answers is averaged
LARGE_AT_ONCE = 2  # large lines that may wait for room with their token ids in memory


class BatchResources:
    """State shared by all batches of a server. checks, places: semaphores that limit the batches
    that are checked and that run at once. room: semaphore that limits samples and bytes of the
    lines at the engine."""

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
    """Computes the outcome of each line of `path` that `output` lacks.

    new_check: makes a line check with the batch's model and endpoint. counted: function called each
    time that outcomes are on the disk. suspects: points of lines from earlier deaths
    (poison_lines.py). cancelled: True: don't run good lines any more. owner: owner of the lines in
    the engine's queue. evidence: after the engine's death, the points for lines that were at the
    engine, by line number.
    """

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
        # results of lines, to be written; None marks the end
        self._outbox: asyncio.Queue[LineOutcome | None] = asyncio.Queue()
        self._owner, self._cancelled = owner, cancelled
        self._answer_bytes = 0.0  # mean bytes of the answer of one sample
        self._kept = 0  # bytes of results that are not yet written
        self._stage = 0  # stage (poison_lines.py) of the lines that run now
        # requests that the engine is running, by line number
        self._at_engine: dict[int, LineRequest] = {}
        self.suspects, self.evidence = suspects, dict[int, int]()

    @property
    def in_flight(self) -> int:
        """Returns the number of lines that the engine is running."""
        return len(self._at_engine)

    async def run(self, stopped: asyncio.Event) -> None:
        """Runs until all lines have a result or `stopped` is set. Before it ends in any way, writes
        the computed outcomes if the disk allows. Raises EngineError if the engine dies, and the
        disk's errors."""
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
        """Computes the results of all lines, stage by stage."""
        begun = time.monotonic()
        stage: int | None = 0
        while stage is not None:
            if stage >= ALONE_FROM:
                await asyncio.sleep(begun + self._shared.limits.settled_seconds - time.monotonic())
            self._stage = stage
            await self._pass()
            stage = self.suspects.stage_after(stage)

    async def _pass(self) -> None:
        """Runs all lines of the present stage (poison_lines.py)."""
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
        """Submits a line to the engine, or puts its outcome into the outbox if it need not run."""
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
        """Runs a line until it has its outcome. Sets `inside` once the line is at the engine, so
        that the next line may start."""
        tries = 0
        while not await self._ran(number, request, tries, inside):
            tries += 1

    async def _ran(
        self, number: int, request: LineRequest, tries: int, inside: asyncio.Event
    ) -> bool:
        """Runs a line once. Returns True if it then has an outcome. Its room is freed when the
        outcome is in the outbox, so that a slow disk slows the engine down. While many answers wait
        for the disk, no line is submitted."""
        room, answers = self._shared.room, self._shared.lines.answers
        weight = self._weight(request, tries)
        alone = tries > 0 and weight == room.capacity
        await room.acquire(*weight)
        try:
            await answers.kept.until(0 if alone else answers.most // 2)
            inside.set()
            self._at_engine[number] = request
            outcome = await request.outcome(alone=alone)
            if outcome is not None:
                self._answer_bytes += (
                    len(outcome.text) / request.sequences - self._answer_bytes
                ) / MEAN_OF
                await self._bring(outcome)
            return outcome is not None
        except EngineError:
            # this line is the first to notice the death, and the others are cancelled
            if not self.evidence:
                found = {each: there.evidence() for each, there in self._at_engine.items()}
                self.evidence = {each: points for each, points in found.items() if points}
            raise
        finally:
            self._at_engine.pop(number, None)
            room.release(*weight)

    def _weight(self, request: LineRequest, tries: int) -> tuple[int, int]:
        """Returns the room that a line takes: (samples, bytes). Counts a sample as several if
        answers are so large that memory wouldn't suffice for a full room of answers of twice the
        mean size. A line without memory for its answer takes more room at each retry, finally all
        of it. Suspects also take more."""
        capacity, most = self._shared.room.capacity, self._shared.lines.answers.most
        share = max(1.0, 2 * self._answer_bytes * capacity[0] / most) * MORE_ROOM**tries
        sequences = math.ceil(request.sequences * share)
        if self._stage >= FEW_FROM:
            sequences = max(sequences, math.ceil(capacity[0] / FEW))
        if self._stage >= ALONE_FROM or (tries and sequences >= capacity[0]):
            return capacity
        return sequences, request.size

    async def _bring(self, outcome: LineOutcome) -> None:
        """Puts an outcome into the outbox, and waits while too many outcomes wait for the disk. The
        outcome's bytes count until it is on the disk or the pipeline ends."""
        size = len(outcome.text)
        self._kept += size
        self._shared.lines.answers.kept.add(size)
        self._outbox.put_nowait(outcome)
        await self._shared.lines.answers.kept.until(self._shared.limits.outbox_bytes)

    def _let_go(self, size: int) -> None:
        self._kept -= size
        self._shared.lines.answers.kept.add(-size)

    async def _write(self) -> None:
        """Writes outcomes to the disk, several at a time, until the end marker comes."""
        last = False
        while not last:
            found = [await self._outbox.get()]
            # waits a moment, since other outcomes come soon and share the sync
            if found[0] is not None:
                await asyncio.sleep(self._shared.limits.commit_seconds)
            while not self._outbox.empty():
                found.append(self._outbox.get_nowait())
            last = found[-1] is None
            if outcomes := [each for each in found if each is not None]:
                await asyncio.to_thread(self._output.put, outcomes)
                self._let_go(sum(len(outcome.text) for outcome in outcomes))
                await self._counted()


async def _whole(work: Coroutine[Any, Any, None]) -> None:
    """Runs work to its end even if the caller is cancelled, and raises the cancellation afterwards,
    since a thread may still be writing the caller's data."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    task.result()


RATE_SPAN = 60.0  # seconds over which the rate of finished lines is measured


class Eta:
    """Estimates a batch's end from the numbers of finished lines over time."""

    def __init__(self) -> None:
        # (time in seconds, number of lines done by then)
        self._seen: deque[tuple[float, int]] = deque()

    def note(self, done: int) -> None:
        now = time.monotonic()
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[0][0] > RATE_SPAN:
            self._seen.popleft()

    def expected_end(self, total: int, forecast: float = 0.0, there: int = 0) -> int | None:
        """Returns the expected end in Unix seconds; None while unknown. total: number of lines. The
        time since the last finished line counts too, so that the end moves away while online
        requests use the whole engine.

        forecast: seconds until the engine has finished its present work, by its scheduler. there:
        number of this batch's lines in that work; later lines are assumed to take as long, with as
        many at once. Returns the later of two estimates, by the rate and by the forecast. Long
        lines end in waves: just after a wave the rate is too optimistic, and in its middle the
        forecast is.
        """
        (first, before), (_, done) = (
            (self._seen[0], self._seen[-1]) if self._seen else ((0.0, 0), (0.0, 0))
        )
        seconds = [forecast * max((total - done) / there, 1.0)] if forecast and there else []
        if done > before:
            seconds.append((total - done) * (time.monotonic() - first) / (done - before))
        return round(time.time() + max(seconds)) if seconds else None
