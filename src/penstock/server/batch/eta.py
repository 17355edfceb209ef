"""How far a batch is, and when it may end: by the rate of the last minute and by what the scheduler expects, as of now.
It knows a clock and counts."""

from __future__ import annotations

import time
from collections import deque

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
        """Unix seconds; None where nothing is known yet. The time since the last line counts: while the online load
        leaves a batch nothing, its end goes away.

        forecast: seconds until all that the engine has is done, as its scheduler expects, with `there` lines of this
        batch among it; those to come take as long, as many at once. Of rate and forecast the later end counts: long
        lines end in waves, and just behind one the rate is far too good; half done, they look too short to the other.
        """
        (first, before), (_, done) = (self._seen[0], self._seen[-1]) if self._seen else ((0.0, 0), (0.0, 0))
        seconds = [forecast * max((total - done) / there, 1.0)] if forecast and there else []
        if done > before:
            seconds.append((total - done) * (time.monotonic() - first) / (done - before))
        return round(time.time() + max(seconds)) if seconds else None
