"""SandboxTurns: the order of jobs in the sandboxes. Owners (API keys, batches) take turns. Long
jobs, and all jobs of batches, leave one sandbox free for short jobs, which would otherwise wait for
them. Knows jobs and owners; no requests, no lines of batches.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeVar

from penstock.sandbox.sandbox import SandboxPool
from penstock.sandbox.sandbox_process import (
    ChatJob,
    GrammarJob,
    Job,
    Reply,
    TellJob,
    TextJob,
    TokensJob,
)
from penstock.server.online.fair_semaphore import FairSemaphore

# ASCII letters; a job that costs as much as more letters counts as long, which means 10 ms of
# tokenizing or more
LONG = 65_536
A_SIGN = 4  # letters that a non-ASCII character counts as, since it may be as many tokens
A_PART = 16  # letters that a message, a field or a list entry counts as
# letters that a letter of a schema counts as; a schema of 160 KB with 5,000 properties took 0.9 s
OF_A_FORM = 16

Result = TypeVar("Result")


class Soon(Protocol):
    """Function that awaits work and cancels it if the client leaves."""

    def __call__(self, work: Awaitable[Result], /) -> Awaitable[Result]: ...


class SandboxTurns:
    """Turns at the sandboxes of one server. most: largest number of sandboxes. every: semaphore for
    all jobs. long: semaphore for long jobs, with one place fewer."""

    def __init__(self, most: int) -> None:
        self.every, self.long = FairSemaphore(most), FairSemaphore(most - 1)

    async def run(
        self, pool: SandboxPool, jobs: Sequence[Job], owner: str, soon: Soon
    ) -> list[Reply]:
        """Runs jobs that a client waits for, each in its own turn. soon: awaits the result while
        the client stays. Raises the errors of SandboxPool.run."""
        if len(jobs) == 1:
            return await self._one(pool, jobs[0], owner, soon, is_long(jobs[0]))
        return await soon(self._several(pool, jobs, owner, all_long=False))

    async def run_aside(self, pool: SandboxPool, jobs: Sequence[Job], owner: str) -> list[Reply]:
        """Runs jobs that no client waits for; they count as long ones. Raises the errors of
        SandboxPool.run."""
        return await self._several(pool, jobs, owner, all_long=True)

    async def _several(
        self, pool: SandboxPool, jobs: Sequence[Job], owner: str, *, all_long: bool
    ) -> list[Reply]:
        tasks = [
            asyncio.ensure_future(self._one(pool, job, owner, _plainly, all_long or is_long(job)))
            for job in jobs
        ]
        try:
            return [reply for (reply,) in await asyncio.gather(*tasks)]
        finally:
            for task in tasks:
                task.cancel()

    async def _one(
        self, pool: SandboxPool, job: Job, owner: str, soon: Soon, long: bool
    ) -> list[Reply]:
        async with contextlib.AsyncExitStack() as held:
            for turns in (self.long, self.every) if long else (self.every,):
                if not turns.take(owner):
                    await soon(turns.acquire(owner=owner))
                held.callback(turns.release, owner=owner)
            return await soon(pool.run([job]))


async def _plainly(work: Awaitable[Result], /) -> Result:
    return await work


def is_long(job: Job) -> bool:
    """Returns True if a job costs more than LONG letters of text. Stops counting there."""
    if isinstance(job, GrammarJob):
        return OF_A_FORM * job.asked.size > LONG
    if isinstance(job, TokensJob):
        return len(job.ids) // 4 > LONG
    waiting: list[Any] = []
    if isinstance(job, TextJob):
        waiting = [job.texts]
    elif isinstance(job, TellJob):
        waiting = [job.text]
    elif isinstance(job, ChatJob):
        waiting = [job.messages, job.template_kwargs, job.tools]
    left = LONG
    while waiting and left >= 0:
        each = waiting.pop()
        if isinstance(each, str):
            left -= len(each) if each.isascii() else A_SIGN * len(each)
        elif isinstance(each, dict | list):
            left -= A_PART * len(each)
            if left >= 0:
                waiting += (*each, *each.values()) if isinstance(each, dict) else each
    return left < 0
