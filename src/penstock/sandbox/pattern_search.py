"""PatternSearches: compiles and searches `stop_when` patterns in a process that can be killed.

A pattern may come from anyone. The regex library holds the interpreter's lock while it compiles and
searches, and may overrun its time limit: the first search for `(?i)` before a thousand times `ſ`
took 0.4 s with a limit of 0.05. So a server's loop runs no pattern itself: a sandbox without a
tokenizer does, with limits on memory and CPU time, and a pattern that exceeds them ends only that
process. Knows patterns and texts; no request.
"""

from __future__ import annotations

import asyncio

from penstock.errors import UsageError
from penstock.sandbox.sandbox import SandboxPool
from penstock.sandbox.sandbox_process import Bounds, PatternJob, Reply
from penstock.text.answer_pattern import BUDGET, SLOW, wrong_pattern

BOUNDS = Bounds(memory=128 * 2**20, seconds=1, grown=32 * 2**20)


class PatternSearches:
    """Pattern searches of one event loop. The process starts with the first job."""

    def __init__(self, bounds: Bounds = BOUNDS) -> None:
        self._pool = SandboxPool(None, 0, 1, bounds, 0.0)

    async def check(self, pattern: str) -> None:
        """Raises UsageError for a pattern that is no valid regex, or too large."""
        await self.run(PatternJob(pattern))

    def of(self, pattern: str) -> PatternSearch:
        """Returns the searches of one request."""
        return PatternSearch(self, pattern)

    async def run(self, job: PatternJob) -> Reply:
        """Runs a job. Raises UsageError for its pattern, and FaultError or CapacityError as
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
    """Searches for one pattern, one at a time, with BUDGET seconds of CPU time for all of them."""

    def __init__(self, searches: PatternSearches, pattern: str) -> None:
        self._searches, self._pattern, self._left = searches, pattern, BUDGET
        self._turn = asyncio.Lock()

    def find(self, text: str) -> asyncio.Future[str | None]:
        """Returns a future of the answer in a text (see AnswerPattern.find). It may raise the
        errors of `PatternSearches.run`."""
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
