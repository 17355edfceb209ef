"""The middle of a batch: lines without a result go to the engine, outcomes to the disk, until none is left.

    input --check--> line --prepare--> gate --> engine --> outbox --group commit--> journals, then counts
               │                        ↑          └─ no room for its answer: again, with more of the room
               └─ bad, or the batch is cancelled ───────────┘

It is killed at any line of this without harm: what was not committed is computed again. It knows lines, gate and
journals; no database, no status.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import EngineError
from penstock.server.batch_call import Caller, LineCall, outcome_of_bad, outcome_of_cancelled
from penstock.server.batch_gate import Gate, Outbox
from penstock.server.batch_lines import BatchLimits, Check, Line, LineError, verdicts
from penstock.server.batch_results import Outcome, Results, Unrun

GROUP_SECONDS = 0.1  # that outcomes wait for others to share a sync with
OUTBOX_BYTES = 32 << 20
MORE_ROOM = 4  # times as much of the gate, for a line that is tried again since its answer had no room
MEAN_OF = 16  # lines, about, whose answers say how large the next ones may be


@dataclass(slots=True)
class Tools:
    """What all batches of a server share."""

    caller: Caller
    gate: Gate
    limits: BatchLimits


class Compute:
    """Gives each line of `path` that `results` doesn't have its outcome. `check` is a new one, with the batch's own
    measure. save: brings outcomes to the disk, however often it has to try; counted is called after each time.
    careful: one line at a time, with the engine to itself, so that a line that kills it is known. cancelled: good lines
    aren't run any more. owner: whose the rows are, in the engine's line.

    died: the engine did, with a line of this batch; `killer` is its custom_id, where it ran alone."""

    def __init__(
        self,
        tools: Tools,
        path: Path,
        check: Check,
        results: Results,
        save: Callable[[Callable[[], None]], Awaitable[None]],
        counted: Callable[[], Awaitable[None]],
        *,
        owner: str = "",
        careful: bool = False,
        cancelled: bool = False,
    ) -> None:
        self._tools, self._path, self._check, self._results = tools, path, check, results
        self._save, self._counted = save, counted
        self._outbox: Outbox[Outcome | Unrun] = Outbox(OUTBOX_BYTES)
        self._owner, self._careful, self._cancelled = owner, careful, cancelled
        self._answer_bytes = 0.0  # of a sequence, in the mean
        self._kept = 0  # bytes of outcomes that are not on the disk
        self.died = False
        self.killer: str | None = None

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
        try:
            async with asyncio.TaskGroup() as rows:
                async for number, found in verdicts(self._path, self._check, self._tools.limits):
                    call = await self._ready(number, found)
                    if isinstance(call, LineCall):
                        inside = asyncio.Event()
                        rows.create_task(self._row(call, inside))
                        await inside.wait()
                    elif call is not None:
                        await self._bring(call)
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    async def _ready(self, number: int, found: Line | LineError) -> LineCall | Outcome | Unrun | None:
        """A line for the engine, or its outcome where that is known without; None where it has one."""
        key = number if found.custom_id is None else found.custom_id
        if self._results.has(key):
            return None
        if isinstance(found, LineError):
            return outcome_of_bad(found, number)
        if self._cancelled:
            return outcome_of_cancelled(found.custom_id)
        return await self._tools.caller.prepare(found, self._owner)

    async def _row(self, call: LineCall, inside: asyncio.Event) -> None:
        """A line from the gate to its outcome; `inside` is set once it is at the engine, and the next one may come."""
        tries = 0
        while not await self._ran(call, tries, inside):
            tries += 1

    async def _ran(self, call: LineCall, tries: int, inside: asyncio.Event) -> bool:
        """Whether it has an outcome. Its place at the engine is free once that has one in the outbox, so a slow disk
        slows the engine down; while many answers wait for the disk, no line is added."""
        gate, wholes = self._tools.gate, self._tools.caller.wholes
        weight = self._weight(call, tries)
        alone = tries > 0 and weight == gate.most
        await gate.enter(*weight)
        try:
            await wholes.until_kept(0 if alone else wholes.most // 2)
            inside.set()
            outcome = await call.outcome(alone=alone)
            if outcome is not None:
                self._answer_bytes += (len(outcome.body) / call.sequences - self._answer_bytes) / MEAN_OF
                await self._bring(outcome)
            return outcome is not None
        except EngineError:
            if call.submitted:  # else the engine was dead before
                self.died = True
                if self._careful and self.killer is None:
                    self.killer = call.custom_id
            raise
        finally:
            gate.leave(*weight)

    def _weight(self, call: LineCall, tries: int) -> tuple[int, int]:
        """How much of the gate it takes: its sequences, or more, so that if all of the gate were full of answers twice
        as large as they are here, there would be room for them. One that had no room for its own takes more with each
        try, and all of the gate in the end."""
        gate, most = self._tools.gate, self._tools.caller.wholes.most
        share = max(1.0, 2 * self._answer_bytes * gate.most[0] / most) * MORE_ROOM**tries
        sequences = math.ceil(call.sequences * share)
        if self._careful or (tries and sequences >= gate.most[0]):
            return gate.most
        return sequences, call.size

    async def _bring(self, outcome: Outcome | Unrun) -> None:
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
