"""PatternSearches: patterns of `stop_when`, compiled and searched for in a process that can be
ended.

A pattern comes from anybody. The library holds the interpreter while it compiles and searches, and
doesn't end each search when it should: the first for `(?i)` before a thousand times `ſ` took 0.4 s
with a limit of 0.05. So a server's loop does none of it: a sandbox without a tokenizer does, inside
bounds of memory and processor time, and what passes them ends with that process. It knows patterns
and texts; no request.
"""

from __future__ import annotations

import asyncio

from penstock.errors import UsageError
from penstock.sandbox.sandbox import SandboxPool
from penstock.sandbox.sandbox_process import Bounds, PatternJob, Reply
from penstock.text.answer_pattern import BUDGET, SLOW, wrong_pattern

BOUNDS = Bounds(memory=128 * 2**20, seconds=1, grown=32 * 2**20)


class PatternSearches:
    """Those of one event loop. The process starts with the first."""

    def __init__(self, bounds: Bounds = BOUNDS) -> None:
        self._pool = SandboxPool(None, 0, 1, bounds, 0.0)

    async def check(self, pattern: str) -> None:
        """Raises UsageError for what is no regex, or too large a one."""
        await self.run(PatternJob(pattern))

    def of(self, pattern: str) -> PatternSearch:
        """Returns one request's searches."""
        return PatternSearch(self, pattern)

    async def run(self, job: PatternJob) -> Reply:
        """Does a job. Raises UsageError for its pattern, FaultError and CapacityError as
        SandboxPool.run."""
        try:
            (reply,) = await self._pool.run([job])
        except UsageError as error:
            if error.param == "prompt":  # it passed the sandbox's limits
                raise wrong_pattern(SLOW) from error
            raise
        return reply

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._pool.close()


class PatternSearch:
    """Searches for one pattern, one at a time, which take BUDGET seconds of processor time together
    at most."""

    def __init__(self, searches: PatternSearches, pattern: str) -> None:
        self._searches, self._pattern, self._left = searches, pattern, BUDGET
        self._turn = asyncio.Lock()

    def find(self, text: str) -> asyncio.Future[str | None]:
        """Returns what will be the answer in a text, as AnswerPattern's, or raise as
        `PatternSearches.run`."""
        return asyncio.ensure_future(self._find(text))

    async def _find(self, text: str) -> str | None:
        async with self._turn:
            if self._left <= 0:
                raise wrong_pattern(
                    f"takes more than {BUDGET:g} s on the samples of a request: write it simpler"
                )
            reply = await self._searches.run(PatternJob(self._pattern, text, self._left))
            self._left -= reply.seconds
        return reply.answer
