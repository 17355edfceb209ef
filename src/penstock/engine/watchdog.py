"""Watchdog: ends an engine that hangs. An engine hangs if it has work but completes no step (on a
CPU: no layer) in time; its threads' stacks are printed before it ends.

The alarm is faulthandler's own thread, outside Python's interpreter, since the hanging code may
hold the interpreter's lock for ever. A process that is stopped or stuck in a driver cannot end
itself: its client (async_client.py), which sees the same steps, ends it. Knows time alone.
"""

from __future__ import annotations

import faulthandler
import time

# seconds without a step (on a CPU: without a layer), while there is work, until the engine ends
# itself
STEP_TIMEOUT = 120.0
LATE = 0.25  # fraction of the step timeout after which the engine counts as unhealthy


class Watchdog:
    """Alarm for hanging steps: `began` starts it, `stepped` restarts it, `idle` stops it."""

    def __init__(self, step_timeout: float = STEP_TIMEOUT) -> None:
        self._timeout = step_timeout
        # least seconds between restarts of the alarm; a restart takes 50 us, because it starts a
        # thread
        self._again = min(1.0, step_timeout / 20)
        # time at which the alarm was last restarted; None: it is off
        self._set: float | None = None

    def began(self) -> None:
        """Starts the alarm, if it is off: there is work, so a step is due."""
        if self._set is None:
            self._arm()

    def stepped(self) -> None:
        """Restarts the alarm: a step was read back, or seen to make progress."""
        if self._set is None or time.monotonic() - self._set > self._again:
            self._arm()

    def idle(self) -> None:
        """Stops the alarm: no step is due."""
        if self._set is not None:
            faulthandler.cancel_dump_traceback_later()
            self._set = None

    def _arm(self) -> None:
        faulthandler.dump_traceback_later(self._timeout + self._again, exit=True, file=2)
        self._set = time.monotonic()
