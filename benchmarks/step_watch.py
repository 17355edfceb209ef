"""Watch: a runner that records each step's sizes and waiting times, and opens a window for a
profile.

It stands between an engine and its runner and changes nothing that either sees. At its deadline, or
once its window is over, it sends Ctrl-C: the engine finishes the step and the caller of
`LLM.stream` gets a KeyboardInterrupt.
"""

from __future__ import annotations

import signal
import time
from typing import Any, Protocol

from penstock.engine.roofline import Steps
from penstock.schedule.step import Flight, Runner, StepPlan, StepTokens


class Window(Protocol):
    """Opens at a steady step and closes some steps later."""

    def read(self, rows: int) -> bool:
        """Called when a step with `rows` rows was read. Returns True when the window is over."""


class Watch:
    """The runner that the engine sees. `begin` starts a measurement; everything else is the wrapped
    runner's."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        sizes = getattr(runner, "model_sizes", None)
        self._windows = () if sizes is None else sizes.windows
        self.begin()

    def begin(self, *, deadline: float | None = None, window: Window | None = None) -> None:
        """Starts a measurement. deadline: time.monotonic() at which the work is cut off; None:
        never."""
        self.steps = Steps(self._windows)
        self.waited = 0.0  # seconds in fetch
        self.launching = 0.0  # seconds in launch
        self.cut = False
        self._deadline, self._window = deadline, window

    def launch(self, plan: StepPlan) -> Flight:
        self.steps.note(plan)
        rows = int(plan.rows.size)
        begin = time.perf_counter()
        flight = self._runner.launch(plan)
        self.launching += time.perf_counter() - begin
        return _Watched(self, flight, rows)

    def read(self, rows: int, seconds: float) -> None:
        """Called when a flight was read, after waiting for `seconds`."""
        self.waited += seconds
        over = self._window is not None and self._window.read(rows)
        late = self._deadline is not None and time.monotonic() > self._deadline
        if (over or late) and not self.cut:
            self.cut = True
            self._window = self._deadline = None
            signal.raise_signal(signal.SIGINT)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class _Watched:
    __slots__ = ("_flight", "_rows", "_watch")

    def __init__(self, watch: Watch, flight: Flight, rows: int) -> None:
        self._watch, self._flight, self._rows = watch, flight, rows

    def ready(self) -> bool:
        return self._flight.ready()

    def fetch(self) -> StepTokens:
        begin = time.perf_counter()
        tokens = self._flight.fetch()
        self._watch.read(self._rows, time.perf_counter() - begin)
        return tokens
