"""Live progress of a run in the terminal. It shows the point (load level), its rate, first-token
times, requests in flight and the expected end.

On a terminal, one line that is overwritten; elsewhere one line a load level. Knows words and an
output stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

import numpy as np

from penstock.bench.point_planner import CLOSED, OPEN, PointPlan
from penstock.bench.worker_pool import LoadProgress
from penstock.bench.worker_protocol import Load
from penstock.status_line import StatusLine

EVERY = 0.5  # seconds between two lines on a terminal
FIRSTS = 400  # number of latest first-token times that enter the quantiles


class LiveProgress:
    def __init__(self, shape: str, out: TextIO) -> None:
        self._shape, self._status = shape, StatusLine(out)
        self._plan: PointPlan | None = None
        self._begin = 0.0
        self._last = 0.0
        self._before: LoadProgress | None = None
        self._firsts: list[float] = []
        self._points = 0

    def __enter__(self) -> LiveProgress:
        if self._status.live:
            self._status.show("starting")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._done(stopped=kind is not None)

    def of(self, shape: str) -> Callable[[PointPlan, Load, LoadProgress | None], None]:
        """Returns `tell` for the load levels of a workload shape."""

        def tell(plan: PointPlan, load: Load, now: LoadProgress | None) -> None:
            if now is None:
                self._done()
                self._shape = shape
            self.tell(plan, load, now)

        return tell

    def tell(self, plan: PointPlan, load: Load, now: LoadProgress | None) -> None:
        """Shows that a load level begins (`now` is None), or the running load level's progress."""
        if now is None:
            self._done()
            self._plan, self._begin, self._before, self._firsts = plan, time.monotonic(), None, []
            self._points += 1
            return
        self._firsts = (self._firsts + now.firsts)[-FIRSTS:]
        if self._status.live and time.monotonic() - self._last > EVERY:
            self._status.show(self._line(plan, load, now))
            self._last = time.monotonic()
        self._before = now

    def _line(self, plan: PointPlan, load: Load, now: LoadProgress) -> str:
        rate = (now.output_tokens or now.events) / max(now.seconds, 1e-9)
        first = ""
        if self._firsts:
            low, high = np.quantile(self._firsts, [0.5, 0.95])
            first = f"first token p50 {1e3 * low:,.0f} p95 {1e3 * high:,.0f} ms  "
        failed = f"  {now.failed} failed" if now.failed else ""
        counted = (
            f"{now.ended} ended"
            if plan.kind in (OPEN, CLOSED)
            else f"{now.ended} of {now.asked} ended"
        )
        return (
            f"{self._shape} point {self._points} {plan.name}: {rate:,.0f} tok/s  {first}"
            f"{now.in_flight} in flight  {counted}{failed}  {_left(plan, load, now)}"
        )

    def _done(self, *, stopped: bool = False) -> None:
        if self._plan is None:
            return
        took = time.monotonic() - self._begin
        last = self._before
        ended = (
            f"{last.ended - last.unfinished} ended, {last.failed} failed"
            if last is not None
            else "no news"
        )
        if last is not None and last.unfinished:
            ended += f", {last.unfinished} unfinished"
        until = (
            f"stopped after {took:.1f} s, and begun anew when the run goes on"
            if stopped
            else f"{took:.1f} s"
        )
        self._status.keep(f"{self._shape} {self._plan.name}: {ended}, {until}")
        self._plan = None


def _left(plan: PointPlan, load: Load, now: LoadProgress) -> str:
    """Returns the remaining time as text. It is extrapolated from the ended requests if their
    number is fixed; for a time window it is known."""
    at_most = max(0.0, load.stop_after - now.seconds)
    if plan.kind in (OPEN, CLOSED):
        window = max(0.0, load.window[1] - now.seconds)
        return f"{window:,.0f} s left" if window else f"at most {at_most:,.0f} s left"
    if not now.ended:
        return f"at most {at_most:,.0f} s left"
    return f"about {min(at_most, (now.asked - now.ended) * now.seconds / now.ended):,.0f} s left"
