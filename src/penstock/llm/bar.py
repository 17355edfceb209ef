"""Bar: generate's and chat's progress line, on a terminal only. It knows no engine."""

from __future__ import annotations

import time

from penstock.status_line import StatusLine, duration

EVERY = 0.1  # seconds between two lines


class Bar:
    """How many samples have ended, since when, and how long the others should take."""

    def __init__(self, samples: int) -> None:
        self._line = StatusLine()
        self._total, self._done = samples, 0
        self._begin = self._shown = time.monotonic()

    def advance(self) -> None:
        self._done += 1
        if self._line.live and time.monotonic() - self._shown > EVERY:
            self._shown = time.monotonic()
            self._line.show(self._text())

    def close(self) -> None:
        if self._line.live:
            self._line.keep(self._text())

    def _text(self) -> str:
        took = time.monotonic() - self._begin
        left = f", about {duration(took / self._done * (self._total - self._done))} left" if self._done else ""
        return f"penstock: {self._done:,}/{self._total:,} samples, {duration(took)}{left}"
