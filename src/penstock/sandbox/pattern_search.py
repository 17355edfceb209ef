"""PatternSearches: searches for `stop_when` patterns in a child process. The process can be killed.

A pattern may come from anyone. The regex library holds the interpreter's lock while it compiles and
searches, and may overrun its time limit: the first search for `(?i)` before a thousand times `ſ`
took 0.4 s with a limit of 0.05. So a server's event loop runs no pattern itself. A sandbox process
without a tokenizer runs them, with limits on memory and CPU time, and a pattern that exceeds the
limits ends only that process. Knows patterns and texts; no request.
"""

from __future__ import annotations

import asyncio

from penstock.errors import UsageError
from penstock.sandbox.sandbox import SandboxPool
from penstock.sandbox.sandbox_process import Bounds, PatternJob, Reply
from penstock.text.answer_pattern import BUDGET, SLOW, wrong_pattern

BOUNDS = Bounds(memory=128 * 2**20, seconds=1, grown=32 * 2**20)


class PatternSearches:
    """Pattern searches of one event loop. Their process starts with the first job."""

    def __init__(self, bounds: Bounds = BOUNDS) -> None:
        self._pool = SandboxPool(None, 0, 1, bounds, 0.0)

    async def check(self, pattern: str) -> None:
        """Raises UsageError for a pattern that is an invalid regex, or too large."""
        await self.run(PatternJob(pattern))

    def of(self, pattern: str) -> PatternSearch:
        """Returns the searcher for one request, with its own time budget."""
        return PatternSearch(self, pattern)

    async def run(self, job: PatternJob) -> Reply:
        """Runs a job. Raises UsageError for a bad pattern, and FaultError or CapacityError as
        SandboxPool.run does."""
        try:
            (reply,) = await self._pool.run([job])
        except UsageError as error:
            if error.param == "prompt":  # the job exceeded the sandbox's limits
                raise wrong_pattern(SLOW) from error
            raise
        return reply

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._pool.close()


class PatternSearch:
    """Searches for one pattern in one text at a time. All searches together get BUDGET seconds of
    CPU time."""

    def __init__(self, searches: PatternSearches, pattern: str) -> None:
        self._searches, self._pattern, self._left = searches, pattern, BUDGET
        self._turn = asyncio.Lock()

    def find(self, text: str) -> asyncio.Future[str | None]:
        """Returns a future of the pattern's match in a text (see AnswerPattern.find). The future
        may raise the errors of `PatternSearches.run`."""
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
