"""Watchdog: an engine that completes no step while it has work, nor a layer of one, says where it
hangs, and ends.

The alarm is faulthandler's own thread, outside Python's interpreter, since what hangs may hold its
lock for ever. What no process can do for itself, ending while it is stopped or stuck in a driver,
is its client's (async_client.py), which sees the same steps. It knows time alone.
"""

from __future__ import annotations

import faulthandler
import time

# seconds without a step, or a layer of one on a CPU, while there is work, after which it ends
STEP_TIMEOUT = 120.0
LATE = 0.25  # of it, from which on the engine isn't well


class Watchdog:
    """`began` and `stepped` set the alarm anew, `idle` stops it."""

    def __init__(self, step_timeout: float = STEP_TIMEOUT) -> None:
        self._timeout = step_timeout
        # it is set no more often than that: it starts a thread, 50 us
        self._again = min(1.0, step_timeout / 20)
        self._set: float | None = None  # when it was

    def began(self) -> None:
        """There is work: a step is due, if none was before."""
        if self._set is None:
            self._arm()

    def stepped(self) -> None:
        """A step was completed: read back, whatever it brought. Or one is seen to go on."""
        if self._set is None or time.monotonic() - self._set > self._again:
            self._arm()

    def idle(self) -> None:
        """Nothing is due."""
        if self._set is not None:
            faulthandler.cancel_dump_traceback_later()
            self._set = None

    def _arm(self) -> None:
        faulthandler.dump_traceback_later(self._timeout + self._again, exit=True, file=2)
        self._set = time.monotonic()
