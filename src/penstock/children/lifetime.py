"""What doesn't end a process of ours, and what does: lines that nobody takes, and signals that are
its parent's, don't; the end of the process that started it does. It knows descriptors, signals and
Linux; no engine.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import sys
from typing import Any

_SET_PARENT_DEATH_SIGNAL = (
    1  # PR_SET_PDEATHSIG, prctl(2); it is sent when the thread that started us ends
)


def begin_child() -> None:
    """The first thing that a process of a service does which another one started."""
    leave_signals()
    lose_lines()
    end_with_parent()


def leave_signals() -> None:
    """Ignores what ends a group of processes: Ctrl-C and a terminal's end reach the whole terminal,
    a service manager's SIGTERM the whole group. The parent says when to end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> None:
    """Has the kernel kill this process when the one that started it has gone; on Linux. Elsewhere
    the standard input is all there is: children of ours watch it, for it ends with the parent. That
    takes a thread that runs: one that hangs inside a library, with the interpreter's lock held, or
    a process that was stopped, would never look. A parent that has gone already is for the caller
    to see, by its standard input."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        if prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL.value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def lose_lines() -> None:
    """From here on lines that standard output or error doesn't take (a full disk, a reader that
    left) are lost: they raise nothing. Where somebody put another object in their place, that
    stays."""
    # One of them that was closed at the start would be the number of the next socket or file that
    # is opened.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _lossy(sys.stdout, "standard output")
    if sys.stderr is sys.__stderr__:
        sys.stderr = _lossy(sys.stderr, "standard error")


def _lossy(stream: Any, what: str) -> io.TextIOWrapper:
    """The same stream, a line a write; /dev/null for one that is closed."""
    if stream is None or stream.closed:
        return open(os.devnull, "w")
    with contextlib.suppress(OSError):
        stream.flush()
    file = LossyFile(stream.fileno(), "wb", what, closefd=False)
    return io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True)


class LossyFile(io.FileIO):
    """A file whose write raises nothing: no service may suffer for a line about it. Lost lines are
    told once, on standard error; where a part of one was written, the next begins on a line of its
    own. what: its name there."""

    _lost = _torn = False

    def __init__(self, file: int | str, mode: str, what: str, *, closefd: bool = True) -> None:
        super().__init__(file, mode, closefd)
        self._what = what

    def write(self, data: Any, /) -> int:
        data = b"\n" * self._torn + bytes(data)
        why: str | None = "no room"
        try:
            # None: a pipe that is full, and that nobody waits for
            written = super().write(data) or 0
        except OSError as error:
            written, why = 0, error.strerror
        if written:
            self._torn = written < len(data)
        if written < len(data) and not self._lost:
            self._lost = True
            with contextlib.suppress(OSError):
                line = (
                    f"penstock: lines of {self._what} are lost ({why}): see that they can be"
                    " written"
                )
                print(line, file=sys.stderr, flush=True)
        return written
