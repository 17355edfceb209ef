"""A batch whose disk fails, or whose process dies, at the k-th touch of the disk, for every k.

A touch is a write, sync, cut, rename or new folder of contents and journals, or a transaction of the store. It is
counted in a forked process (batch_kills.sitting) by standing in the way of the calls themselves. It knows how the
batch's files reach the disk; what is checked of the result is batch_kills'.

`python tests/reliability/batch_faults.py [LINES]` prints one line of figures.
"""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from batch_kills import Report, make_batch, read_end, sitting

from penstock import journal
from penstock.server import batch_run, batch_shelf
from penstock.server.batch_store import Store

KINDS = ("kill", "kill after", "ENOSPC", "EIO", "short", "full for a while")
WHILE = 5  # touches that fail in a row
_FAST = 1e6  # lines a second: all of a small batch in one group
_STORE = ("add_file", "add_batch", "move", "note", "finish")


class Touches:
    """Counts touches of the disk, and does what it is told to at one of them."""

    def __init__(self, kind: str, at: int, count: int) -> None:
        self.kind, self.at, self._count = kind, at, count

    def __call__(self, call: Callable[..., Any], *values: Any, store: bool = False, write: bool = False) -> Any:
        number = int.from_bytes(os.pread(self._count, 8, 0), "little") + 1
        os.pwrite(self._count, number.to_bytes(8, "little"), 0)  # outlives a kill
        if number == self.at and self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        last = self.at + (WHILE if self.kind == "full for a while" else 1)
        if self.at <= number < last and self.kind in ("ENOSPC", "EIO", "full for a while"):
            if write and number % 2:  # a full disk takes a part of it first
                call(bytes(values[0])[: len(values[0]) // 2])
            raise self._error(store)
        if number == self.at and self.kind == "short" and write and len(values[0]) > 1:
            return call(bytes(values[0])[: len(values[0]) // 2])
        try:
            return call(*values)
        finally:
            if number == self.at and self.kind == "kill after":
                os.kill(os.getpid(), signal.SIGKILL)

    def _error(self, store: bool) -> Exception:
        number = errno.EIO if self.kind == "EIO" else errno.ENOSPC
        if store:
            return sqlite3.OperationalError("disk I/O error" if number == errno.EIO else "database or disk is full")
        return OSError(number, os.strerror(number))


class _File(FileIO):
    """A file whose writes and cuts are touches."""

    touches: Touches

    def write(self, data: Any) -> int:
        written: int = self.touches(super().write, data, write=True)
        return written

    def truncate(self, size: int | None = None) -> int:
        if size == os.fstat(self.fileno()).st_size:
            return self.fileno()  # nothing to cut: no touch of the disk
        cut: int = self.touches(super().truncate, size)
        return cut


def stand_in_the_way(touches: Touches) -> None:
    """In this process for good: every way of a batch to the disk."""
    file = type("File", (_File,), {"touches": touches})

    def open_file(path: Any, mode: str = "r", buffering: int = -1) -> Any:
        return file(path, mode.replace("b", "")) if buffering == 0 else open(path, mode, buffering)

    for room in (journal, batch_shelf):
        room.open = open_file  # type: ignore[attr-defined]
    fsync, rename, mkdir = os.fsync, os.rename, os.mkdir
    os.fsync = lambda handle: touches(fsync, handle)
    os.rename = lambda a, b: touches(rename, a, b)  # type: ignore[assignment, misc]
    os.mkdir = lambda *values: touches(mkdir, *values)  # type: ignore[assignment, misc]
    for name in _STORE:
        _wrap(name, touches)
    batch_run.FIRST_PAUSE = batch_run.LONGEST_PAUSE = 0.005


def _wrap(name: str, touches: Touches) -> None:
    plain = getattr(Store, name)

    def wrapped(store: Store, *values: Any, **named: Any) -> Any:
        return touches(lambda: plain(store, *values, **named), store=True)

    setattr(Store, name, wrapped)


@dataclass
class Faults:
    """What came of all of them, by kind."""

    tried: dict[str, int] = field(default_factory=dict)
    report: Report = field(default_factory=Report)

    def line(self) -> str:
        tried = ", ".join(f"{kind} {count}" for kind, count in self.tried.items())
        counts = f"{self.report.lost} lost, {self.report.doubled} doubled, {self.report.torn} torn"
        return f"a fault at each touch of the disk ({tried}): {counts}"


def try_all(folder: Path, lines: int, every: int = 1, rate: float = _FAST) -> Faults:
    """Each kind at each `every`-th touch; a batch of its own each time, which has to come to its end."""
    faults = Faults()
    for kind in KINDS:
        at, touched = 1, True
        faults.tried[kind] = 0
        while touched:
            touched = _try(folder / f"{kind} {at}", lines, kind, at, rate, faults.report)
            faults.tried[kind] += touched
            at += every
    return faults


def _try(folder: Path, lines: int, kind: str, at: int, rate: float, total: Report) -> bool:
    """False where the batch ended before that many touches."""
    folder.mkdir()
    batch_id = make_batch(folder / "state", lines)
    count = os.open(folder / "count", os.O_RDWR | os.O_CREAT)
    os.pwrite(count, bytes(8), 0)
    touches = Touches(kind, at, count)
    # A folder that fails while it is opened refuses the start, in one line; a kill may come there too.
    moment = "first" if kind.startswith("kill") else "once_open"
    hook: Any = {moment: lambda: stand_in_the_way(touches)}
    status = sitting(folder / "state", batch_id, folder / "log", rate, **hook)
    touched = int.from_bytes(os.pread(count, 8, 0), "little")
    os.close(count)
    killed = os.WIFSIGNALED(status)
    assert killed == (kind.startswith("kill") and touched >= at) and (killed or status == 0), f"{kind} {at}: {status}"
    if killed:
        assert sitting(folder / "state", batch_id, folder / "log", _FAST) == 0
    report = Report(lines=lines)
    read_end(folder / "state", batch_id, report)
    for name in ("lost", "doubled", "torn"):
        setattr(total, name, getattr(total, name) + getattr(report, name))
    return touched >= at


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        began = time.monotonic()
        made = try_all(Path(place), int(sys.argv[1]) if len(sys.argv) > 1 else 30)
        print(made.line() + f"; {time.monotonic() - began:.0f} s")
        sys.exit(bool(made.report.lost or made.report.doubled or made.report.torn))
