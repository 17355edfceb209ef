"""The middle of a batch: lines without a result go to the engine, outcomes to the disk, until none is left.

    input --check--> line --prepare--> gate --> engine --> outbox --group commit--> journals, then counts
               └─ bad, or the batch is cancelled ───────────┘

It is killed at any line of this without harm: what was not committed is computed again. It knows lines, gate and
journals; no database, no status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import EngineError
from penstock.server.batch_call import Caller, LineCall, outcome_of_bad, outcome_of_cancelled
from penstock.server.batch_gate import Gate, Outbox
from penstock.server.batch_lines import BatchLimits, Check, Line, LineError, verdicts
from penstock.server.batch_results import Outcome, Results, Unrun

GROUP_SECONDS = 0.1  # that outcomes wait for others to share a sync with
OUTBOX_BYTES = 32 << 20


@dataclass(slots=True)
class Tools:
    """What all batches of a server share."""

    caller: Caller
    gate: Gate
    limits: BatchLimits


class Compute:
    """Gives each line of `path` that `results` doesn't have its outcome. `check` is a new one, with the batch's own
    measure. save: brings outcomes to the disk, however often it has to try; counted is called after each time.
    careful: one line at a time, with the engine to itself, so that a line that kills it is known: `killer` is its
    custom_id. cancelled: good lines aren't run any more. owner: whose the rows are, in the engine's line."""

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
            for task in (feeding, stopping):
                task.cancel()
            await asyncio.wait((feeding, stopping))
            await self._outbox.close()
            await asyncio.wait((writing,))
        writing.result()
        if not feeding.cancelled():
            feeding.result()

    async def _feed(self) -> None:
        """Returns when the last line has its outcome."""
        try:
            async with asyncio.TaskGroup() as rows:
                async for number, found in verdicts(self._path, self._check, self._tools.limits):
                    call = await self._ready(number, found)
                    if isinstance(call, LineCall):
                        weight = self._tools.gate.most if self._careful else (call.sequences, call.size)
                        await self._tools.gate.enter(*weight)
                        rows.create_task(self._row(call, weight))
                    elif call is not None:
                        await self._outbox.put(call)
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

    async def _row(self, call: LineCall, weight: tuple[int, int]) -> None:
        """Its place in the gate is free once its outcome has one in the outbox: a slow disk slows the engine down."""
        try:
            await self._outbox.put(await call.outcome())
        except EngineError:
            if self._careful and self.killer is None:  # the next line may be let in before all of this is ended
                self.killer = call.custom_id
            raise
        finally:
            self._tools.gate.leave(*weight)

    async def _write(self) -> None:
        while await self._outbox.some(GROUP_SECONDS):
            outcomes = await self._outbox.take()
            await self._save(lambda outcomes=outcomes: self._results.put(outcomes))  # type: ignore[misc]
            await self._counted()
