"""Watchdog: an engine that completes no step while it has work says where it hangs, then ends.

Both alarms are set off outside Python's interpreter, since what hangs may hold its lock for ever: the stacks are
written by faulthandler's own thread, the end is the kernel's SIGALRM. The stacks go through a pipe to the parent, which
says what they are. What else no process can do for itself, ending while it is stopped or stuck in a driver, is its
client's (async_client.py), which sees the same steps. It knows time alone.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time

STEP_TIMEOUT = 120.0  # seconds without a completed step, while there is work, after which an engine ends
DUMP_AT = 0.25  # of it, after which it says where it is


class Watchdog:
    """`began` and `stepped` set both alarms anew, `idle` stops them; 1 us each, but for one in a second at most.
    stacks: the descriptor that they are written to."""

    def __init__(self, step_timeout: float = STEP_TIMEOUT, stacks: int = 2) -> None:
        self._timeout, self._stacks = step_timeout, stacks
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
            faulthandler.dump_traceback_later(self._timeout * DUMP_AT, file=self._stacks)
            self._dump_set = now
        self._armed = True


def tell_stacks(stacks: int, process: int, step_timeout: float) -> None:
    """Has a thread take an engine's stacks from the pipe's end `stacks`, until the engine has gone, and put them on
    standard error behind a line that says what they are."""
    threading.Thread(target=_tell_stacks, args=(stacks, process, step_timeout), daemon=True).start()


def _tell_stacks(stacks: int, process: int, step_timeout: float) -> None:
    with open(stacks, errors="replace") as lines:
        for said in lines:
            print(_about(process, step_timeout) if said.startswith("Timeout (") else said.rstrip("\n"), file=sys.stderr)


def _about(process: int, step_timeout: float) -> str:
    passed = step_timeout * DUMP_AT
    return (
        f"penstock: the engine (process {process}) has work and completed no step for {passed:g} s. That alone is no "
        "fault: a step may be long, or the machine busy. It goes on, and is ended if none is completed for "
        f"{step_timeout - passed:g} s more (--step-timeout {step_timeout:g}). Where its threads are now:"
    )
