"""Makes a child process end with its parent. Signals meant for the parent and failed writes to the
log don't end it. Knows file descriptors, signals and Linux; no engine."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import sys
from typing import Any

# PR_SET_PDEATHSIG of prctl(2). The kernel sends the signal when the thread that started this
# process ends.
_SET_PARENT_DEATH_SIGNAL = 1


def begin_child() -> None:
    """Sets up a child process of a service. The child calls it before anything else."""
    leave_signals()
    lose_lines()
    end_with_parent()


def leave_signals() -> None:
    """Ignores the signals that end a group of processes: Ctrl-C and a closed terminal reach every
    process of the terminal, and a service manager's SIGTERM reaches the whole group. The parent
    ends its children itself."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> None:
    """Has the kernel kill this process when its parent has gone. Works on Linux only. Elsewhere
    child processes watch their standard input, which ends with the parent. That takes a running
    thread: a process that is stopped, or hangs inside a library with the interpreter's lock held,
    would never notice. If the parent has gone before this call, only the end of standard input
    shows it."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        if prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL.value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def lose_lines() -> None:
    """Makes failed writes to standard output and error (full disk, closed pipe) lose their lines
    without raising. Keeps a stream that other code has replaced, as pytest does."""
    # A standard stream that was closed at the start leaves its number (0 to 2) free, and the next
    # socket or file would get it.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _lossy(sys.stdout, "standard output")
    if sys.stderr is sys.__stderr__:
        sys.stderr = _lossy(sys.stderr, "standard error")


def _lossy(stream: Any, what: str) -> io.TextIOWrapper:
    """Returns the same stream, flushed after each line; /dev/null for a closed stream."""
    if stream is None or stream.closed:
        return open(os.devnull, "w")
    with contextlib.suppress(OSError):
        stream.flush()
    file = LossyFile(stream.fileno(), "wb", what, closefd=False)
    return io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True)


class LossyFile(io.FileIO):
    """A file whose `write` never raises, so that no service fails because of a log line. The first
    lost line is reported once on standard error. After a partly written line, the next write begins
    a new line. what: the file's name in the report."""

    _lost = _torn = False

    def __init__(self, file: int | str, mode: str, what: str, *, closefd: bool = True) -> None:
        super().__init__(file, mode, closefd)
        self._what = what

    def write(self, data: Any, /) -> int:
        data = b"\n" * self._torn + bytes(data)
        why: str | None = "no room"
        try:
            # `write` returns None if the pipe is full and non-blocking
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
