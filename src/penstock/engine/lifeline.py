"""end_with_parent: the kernel kills this process when the one that started it has gone. It knows Linux; no engine.

Children of ours also watch their standard input, which ends with the parent. That takes a thread that runs: one that
hangs inside a library, with the interpreter's lock held, or a process that was stopped, would never look.
"""

from __future__ import annotations

import ctypes
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, prctl(2); it is sent when the thread that started us ends


def end_with_parent() -> None:
    """On Linux; elsewhere the standard input is all there is. A parent that has gone already is for the caller to see,
    by its standard input."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        if prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL.value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
