"""The middle of a batch: lines without a result go to the engine, outcomes to the disk, until none is left.

    input --check--> line --prepare--> gate --> engine --> outbox --group commit--> journals, then counts
               │                        ↑          └─ no room for its answer: again, with more of the room
               └─ bad, or the batch is cancelled ───────────┘

It is killed at any line of this without harm: what was not committed is computed again. Lines with which the engine
died before come behind the others (poison_lines). It knows lines, gate and journals; no database, no status.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import EngineError
from penstock.server.batch.fair_semaphore import Gate, Outbox
from penstock.server.batch.input_file import BatchLimits, BatchLine, LineCheck, LineError, verdicts
from penstock.server.batch.line_request import (
    LinePreparer,
    LineRequest,
    outcome_of_bad,
    outcome_of_cancelled,
    outcome_of_killer,
)
from penstock.server.batch.output_files import BatchOutput, LineResult, UnrunLine
from penstock.server.batch.poison_lines import ALONE_FROM, FEW, FEW_FROM, PoisonLines

GROUP_SECONDS = 0.1  # that outcomes wait for others to share a sync with
OUTBOX_BYTES = 32 << 20
MORE_ROOM = 4  # times as much of the gate, for a line that is tried again since its answer had no room
MEAN_OF = 16  # lines, about, whose answers say how large the next ones may be
LARGE, LARGE_AT_ONCE = 1 << 20, 2  # bytes of a line; how many such ones stand before the gate, with all of their ids
SETTLED = 60.0  # seconds before a suspect runs alone: an engine that dies sooner has died of something else


@dataclass(slots=True)
class BatchResources:
    """What all batches of a server share."""

    caller: LinePreparer
    gate: Gate
    limits: BatchLimits
    large: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(LARGE_AT_ONCE))


class Pipeline:
    """Gives each line of `path` that `results` doesn't have its outcome. new_check: a check with the batch's own
    measure. save: brings outcomes to the disk, however often it has to try; counted is called after each time.
    suspects: of earlier deaths. cancelled: good lines aren't run any more. owner: whose the rows are, in the engine's
    line.

    evidence: once the engine has died, what that says against lines that were there, by their numbers."""

    def __init__(
        self,
        tools: BatchResources,
        path: Path,
        new_check: Callable[[], LineCheck],
        results: BatchOutput,
        save: Callable[[Callable[[], None]], Awaitable[None]],
        counted: Callable[[], Awaitable[None]],
        *,
        suspects: PoisonLines,
        owner: str = "",
        cancelled: bool = False,
    ) -> None:
        self._tools, self._path, self._new_check, self._results = tools, path, new_check, results
        self._save, self._counted = save, counted
        self._outbox: Outbox[LineResult | UnrunLine] = Outbox(OUTBOX_BYTES)
        self._owner, self._cancelled = owner, cancelled
        self._answer_bytes = 0.0  # of a sequence, in the mean
        self._kept = 0  # bytes of outcomes that are not on the disk
        self._stage = 0  # of the suspects, whose turn it is
        self._there: dict[int, LineRequest] = {}  # at the engine
        self.suspects, self.evidence = suspects, dict[int, int]()

    @property
    def there(self) -> int:
        """Lines at the engine."""
        return len(self._there)

    async def run(self, stopped: asyncio.Event) -> None:
        """Until all lines have a result, or `stopped`. However it ends, what was computed is written first, if that
        can be. Raises EngineError where the engine died."""
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
        await self._outbox.close()
        await asyncio.wait((writing,))
        self._let_go(self._kept)

    async def _feed(self) -> None:
        """Returns when the last line has its outcome."""
        begun = time.monotonic()
        stage: int | None = 0
        while stage is not None:
            if stage >= ALONE_FROM:
                await asyncio.sleep(begun + SETTLED - time.monotonic())
            self._stage = stage
            await self._pass()
            stage = self.suspects.stage_after(stage)

    async def _pass(self) -> None:
        """All lines of this stage."""
        try:
            async with asyncio.TaskGroup() as rows:
                async for number, found in verdicts(self._path, self._new_check(), self._tools.limits):
                    if self._due(number, found):
                        await self._begin(rows, number, found)
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    def _due(self, number: int, found: BatchLine | LineError) -> bool:
        if self._results.has(number if found.custom_id is None else found.custom_id):
            self.suspects.forget(number)
            return False
        return self.suspects.stage(number) == self._stage

    async def _begin(self, rows: asyncio.TaskGroup, number: int, found: BatchLine | LineError) -> None:
        """Brings a line to the engine, or its outcome to the outbox where that is known without."""
        if isinstance(found, LineError):
            await self._bring(outcome_of_bad(found, number))
        elif self._cancelled:
            await self._bring(outcome_of_cancelled(found.custom_id))
        elif self.suspects.is_killer(number):
            await self._bring(outcome_of_killer(found.custom_id))
        else:
            async with self._tools.large if len(found.body) > LARGE else contextlib.nullcontext():
                call = await self._tools.caller.prepare(found, self._owner)
                if isinstance(call, LineResult):
                    await self._bring(call)
                    return
                inside = asyncio.Event()
                rows.create_task(self._row(number, call, inside))
                await inside.wait()

    async def _row(self, number: int, call: LineRequest, inside: asyncio.Event) -> None:
        """A line from the gate to its outcome; `inside` is set once it is at the engine, and the next one may come."""
        tries = 0
        while not await self._ran(number, call, tries, inside):
            tries += 1

    async def _ran(self, number: int, call: LineRequest, tries: int, inside: asyncio.Event) -> bool:
        """Whether it has an outcome. Its place at the engine is free once that has one in the outbox, so a slow disk
        slows the engine down; while many answers wait for the disk, no line is added."""
        gate, wholes = self._tools.gate, self._tools.caller.wholes
        weight = self._weight(call, tries)
        alone = tries > 0 and weight == gate.most
        await gate.enter(*weight)
        try:
            await wholes.until_kept(0 if alone else wholes.most // 2)
            inside.set()
            self._there[number] = call
            outcome = await call.outcome(alone=alone)
            if outcome is not None:
                self._answer_bytes += (len(outcome.body) / call.sequences - self._answer_bytes) / MEAN_OF
                await self._bring(outcome)
            return outcome is not None
        except EngineError:  # the first line that hears of it; the others are cancelled then
            if not self.evidence:
                self.evidence = {each: points for each, there in self._there.items() if (points := there.evidence())}
            raise
        finally:
            self._there.pop(number, None)
            gate.leave(*weight)

    def _weight(self, call: LineRequest, tries: int) -> tuple[int, int]:
        """How much of the gate it takes: its sequences, or more, so that if all of the gate were full of answers twice
        as large as they are here, there would be room for them. One that had no room for its own takes more with each
        try, and all of the gate in the end; so do suspects."""
        gate, most = self._tools.gate, self._tools.caller.wholes.most
        share = max(1.0, 2 * self._answer_bytes * gate.most[0] / most) * MORE_ROOM**tries
        sequences = math.ceil(call.sequences * share)
        if self._stage >= FEW_FROM:
            sequences = max(sequences, math.ceil(gate.most[0] / FEW))
        if self._stage >= ALONE_FROM or (tries and sequences >= gate.most[0]):
            return gate.most
        return sequences, call.size

    async def _bring(self, outcome: LineResult | UnrunLine) -> None:
        """It counts until it is on the disk, or given up with the whole of this."""
        size = len(outcome.body)
        self._kept += size
        self._tools.caller.wholes.keep(size)
        await self._outbox.put(outcome)

    def _let_go(self, size: int) -> None:
        self._kept -= size
        self._tools.caller.wholes.let_go(size)

    async def _write(self) -> None:
        while await self._outbox.some(GROUP_SECONDS):
            outcomes = await self._outbox.take()
            await self._save(lambda outcomes=outcomes: self._results.put(outcomes))  # type: ignore[misc]
            self._let_go(sum(len(outcome.body) for outcome in outcomes))
            await self._counted()


async def _whole(work: Coroutine[Any, Any, None]) -> None:
    """Does it to its end; a cancel that comes amid it goes on then. Who waits for a thread that writes must not go
    while it writes."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    task.result()
