"""Live progress of a run in the terminal: the point, its rate, first tokens, what is in flight, when it should end.

On a terminal one line that is written over; elsewhere a line a point. It knows words and a stream to write to.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import TextIO

import numpy as np

from penstock.bench.load import Progress
from penstock.bench.method import Plan

EVERY = 0.5  # seconds between two lines on a terminal
FIRSTS = 400  # of the last first-token times that the quantiles are of


class Live:
    def __init__(self, shape: str, out: TextIO) -> None:
        self._shape, self._out = shape, out
        self._plan: Plan | None = None
        self._begin = 0.0
        self._last = 0.0
        self._before: Progress | None = None
        self._firsts: list[float] = []
        self._points = 0

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done()

    def tell(self, plan: Plan, now: Progress | None) -> None:
        """A new point (now None), or news of the one that runs."""
        if now is None:
            self._done()
            self._plan, self._begin, self._before, self._firsts = plan, time.monotonic(), None, []
            self._points += 1
            return
        self._firsts = (self._firsts + now.firsts)[-FIRSTS:]
        if self._out.isatty() and time.monotonic() - self._last > EVERY:
            self._out.write("\r\x1b[K" + self._line(plan, now))
            self._out.flush()
            self._last = time.monotonic()
        self._before = now

    def _line(self, plan: Plan, now: Progress) -> str:
        rate = (now.output_tokens or now.events) / max(now.seconds, 1e-9)
        first = ""
        if self._firsts:
            low, high = np.quantile(self._firsts, [0.5, 0.95])
            first = f"first token p50 {1e3 * low:,.0f} p95 {1e3 * high:,.0f} ms  "
        left = max(0.0, plan.window - now.seconds)
        failed = f"  {now.failed} failed" if now.failed else ""
        return (
            f"{self._shape} point {self._points} {plan.name}: {rate:,.0f} tok/s  {first}"
            f"{now.in_flight} in flight  {now.ended} of {now.sent} ended{failed}  at most {left:,.0f} s left"
        )[:200]

    def _done(self) -> None:
        if self._plan is None:
            return
        took = time.monotonic() - self._begin
        last = self._before
        ended = f"{last.ended} ended, {last.failed} failed" if last is not None else "no news"
        self._out.write(
            ("\r\x1b[K" if self._out.isatty() else "") + f"{self._shape} {self._plan.name}: {ended}, {took:.1f} s\n"
        )
        self._out.flush()
        self._plan = None
