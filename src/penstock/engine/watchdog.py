"""Watchdog: an engine that completes no step while it has work says where it hangs, then ends.

Both alarms are set off outside Python's interpreter, since what hangs may hold its lock for ever: the stacks are
written by faulthandler's own thread, the end is the kernel's SIGALRM. What no process can do for itself, ending while
it is stopped or stuck in a driver, is its parent's (async_client.py), which sees the same steps. It knows time alone.
"""

from __future__ import annotations

import faulthandler
import signal
import time

STEP_TIMEOUT = 120.0  # seconds without a completed step, while there is work, after which an engine ends
DUMP_AT = 0.25  # of it, after which it says where it is


class Watchdog:
    """`began` and `stepped` set both alarms anew, `idle` stops them; 1 us each, but for one in a second at most."""

    def __init__(self, step_timeout: float = STEP_TIMEOUT) -> None:
        self._timeout = step_timeout
        self._dump_again = min(1.0, step_timeout / 20)  # setting the dump's alarm starts a thread: 50 us
        self._dump_set = 0.0
        self._armed = False
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def began(self) -> None:
        """There is work: a step is due, if none was before."""
        if not self._armed:
            self._arm()

    def stepped(self) -> None:
        """A step was completed: read back, whatever it brought."""
        self._arm()

    def idle(self) -> None:
        """Nothing is due."""
        if self._armed:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            faulthandler.cancel_dump_traceback_later()
            self._armed, self._dump_set = False, 0.0

    def _arm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._timeout)
        now = time.monotonic()
        if not self._armed or now - self._dump_set > self._dump_again:
            faulthandler.dump_traceback_later(self._timeout * DUMP_AT)
            self._dump_set = now
        self._armed = True
