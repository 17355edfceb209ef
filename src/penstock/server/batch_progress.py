"""How far a batch is, and when it may end: by the rate of the last minute, as of now, or by what the scheduler expects.
It knows a clock and counts."""

from __future__ import annotations

import time
from collections import deque

RATE_SPAN = 60.0  # seconds that the measured rate looks back


class Progress:
    """Counts of lines done, and when they were."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()  # (when, lines done)

    def note(self, done: int) -> None:
        now = time.monotonic()
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[0][0] > RATE_SPAN:
            self._seen.popleft()

    def expected_end(self, total: int, forecast: float = 0.0, there: int = 0) -> int | None:
        """Unix seconds; None where nothing is known yet. The time since the last line counts: while the online load
        leaves a batch nothing, its end goes away.

        forecast: seconds until all that the engine has is done, as its scheduler expects, with `there` lines of this
        batch among it. It counts while no line was done in the last minute; those to come take as long, as many at
        once."""
        (first, before), (_, done) = (self._seen[0], self._seen[-1]) if self._seen else ((0.0, 0), (0.0, 0))
        if done > before:
            return round(time.time() + (total - done) * (time.monotonic() - first) / (done - before))
        if not (forecast and there):
            return None
        return round(time.time() + forecast * max((total - done) / there, 1.0))
