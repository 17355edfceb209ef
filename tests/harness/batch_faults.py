"""A batch whose disk fails, or whose process dies, at the k-th touch of the disk, for every k.

A touch is an open, read, write, sync, cut, rename or new folder of a batch's input, contents and
journals, or a call of the store. It is counted in a forked process (batch_kills.sitting) by
standing in the way of the calls themselves, of those that a fault makes sense at. Each is tried of
a batch that begins, of one that a kill left half done, and of one that was cancelled. It knows how
the batch's files reach the disk and come from it; what is checked of the result is batch_kills'.

`python tests/reliability/batch_faults.py [LINES]` prints one line of figures.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batch_kills import Report, make_batch, read_end, sitting

from penstock.server.batch.batch_limits import BatchJobLimits
from penstock.server.batch.database import BatchDatabase
from penstock.server.batch.output_files import BatchOutput, LineOutcome

CHANGES = frozenset({"create", "write", "sync", "cut", "rename", "folder", "store"})
OPENS = frozenset({"open", "create"})
KINDS = {  # and the touches that it makes sense at
    "kill": CHANGES,
    "kill after": CHANGES,
    "ENOSPC": CHANGES,
    "EIO": CHANGES | OPENS | {"read", "look"},
    "EMFILE": OPENS,
    "short": frozenset({"write", "read"}),
    "full for a while": CHANGES,
}
WHILE = 5  # touches that fail in a row
PIECE = 1024  # bytes of the input that a read gives: faults come amid its lines, too
_RATE = 1e6  # lines a second: all of a small batch in one group
FAST = BatchJobLimits(first_pause=0.005, longest_pause=0.005, commit_seconds=0.02)
_STORE = {
    **dict.fromkeys(("add_file", "add_batch", "move", "note", "finish"), "store"),
    "batch": "look",
}


class Touches:
    """Counts touches of the files below `place`, and does what it is told to at one of them."""

    def __init__(self, place: Path, kind: str, at: int, count: int) -> None:
        self.kind, self.at, self._place, self._count = kind, at, str(place), count
        self._lock = threading.Lock()

    def holds(self, path: Any) -> bool:
        return not isinstance(path, int) and os.fspath(path).startswith(self._place)

    def __call__(self, what: str, call: Callable[..., Any], *values: Any) -> Any:
        if what not in KINDS[self.kind]:
            return call(*values)
        number = self._next()
        if number == self.at and self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        last = self.at + (WHILE if self.kind == "full for a while" else 1)
        if self.at <= number < last and self.kind in (
            "ENOSPC",
            "EIO",
            "EMFILE",
            "full for a while",
        ):
            if what == "write" and number % 2:  # a full disk takes a part of it first
                call(memoryview(values[0])[: len(values[0]) // 2])
            raise self._error(what)
        if number == self.at and self.kind == "short" and len(values[0]) > 1:
            return call(memoryview(values[0])[: len(values[0]) // 2])
        try:
            return call(*values)
        finally:
            if number == self.at and self.kind == "kill after":
                os.kill(os.getpid(), signal.SIGKILL)

    def _next(self) -> int:
        with self._lock:
            number = int.from_bytes(os.pread(self._count, 8, 0), "little") + 1
            os.pwrite(self._count, number.to_bytes(8, "little"), 0)  # outlives a kill
            return number

    def _error(self, what: str) -> Exception:
        number = {"EIO": errno.EIO, "EMFILE": errno.EMFILE}.get(self.kind, errno.ENOSPC)
        if what in ("store", "look"):
            return sqlite3.OperationalError(
                "disk I/O error" if number == errno.EIO else "database or disk is full"
            )
        return OSError(number, os.strerror(number))


class _File(io.FileIO):
    """A file whose reads, writes and cuts are touches."""

    touches: Touches

    def readinto(self, buffer: Any) -> int:
        read: int = self.touches("read", super().readinto, buffer)
        return read

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None and size > 0, "a journal is read in pieces"
        buffer = bytearray(size)
        return bytes(buffer[: self.readinto(buffer)])

    def write(self, data: Any) -> int:
        written: int = self.touches("write", super().write, data)
        return written

    def truncate(self, size: int | None = None) -> int:
        if size == os.fstat(self.fileno()).st_size:
            return self.fileno()  # nothing to cut: no touch of the disk
        cut: int = self.touches("cut", super().truncate, size)
        return cut


def stand_in_the_way(touches: Touches) -> None:
    """In this process for good: every way of a batch to the disk and back."""
    _watch_opens(touches)
    fsync, rename, mkdir = os.fsync, os.rename, os.mkdir
    os.fsync = lambda handle: touches("sync", fsync, handle)
    os.rename = lambda a, b: touches("rename", rename, a, b)  # type: ignore[assignment, misc]
    os.mkdir = lambda *values: touches("folder", mkdir, *values)  # type: ignore[assignment, misc]
    for name, what in _STORE.items():
        _watch_store(name, what, touches)


def _watch_opens(touches: Touches) -> None:
    """Files by open and Path.open, which takes io's; folders, to be synced, by os.open."""
    file = type("File", (_File,), {"touches": touches})
    open_plainly, open_handle = builtins.open, os.open

    def open_file(path: Any, mode: str = "r", buffering: int = -1, *more: Any, **named: Any) -> Any:
        if not touches.holds(path):
            return open_plainly(path, mode, buffering, *more, **named)
        assert mode == "rb" or ("b" in mode and buffering == 0), (
            "no batch opens a file in another way"
        )
        raw = touches("open" if mode == "rb" else "create", file, path, mode.replace("b", ""))
        return raw if buffering == 0 else io.BufferedReader(raw, PIECE)

    def open_folder(path: Any, flags: int, *values: Any, **named: Any) -> int:
        if not touches.holds(path):
            return open_handle(path, flags, *values, **named)
        what = "create" if flags & os.O_CREAT else "open"
        handle: int = touches(what, lambda: open_handle(path, flags, *values, **named))
        return handle

    builtins.open = io.open = open_file  # type: ignore[assignment]
    os.open = open_folder


def _watch_store(name: str, what: str, touches: Touches) -> None:
    plain = getattr(BatchDatabase, name)

    def wrapped(store: BatchDatabase, *values: Any, **named: Any) -> Any:
        return touches(what, lambda: plain(store, *values, **named))

    setattr(BatchDatabase, name, wrapped)


@dataclass
class Faults:
    """What came of all of them, by kind."""

    tried: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    report: Report = field(default_factory=Report)

    def line(self) -> str:
        tried = ", ".join(f"{kind} {count}" for kind, count in self.tried.items())
        counts = f"{self.report.lost} lost, {self.report.doubled} doubled, {self.report.torn} torn"
        return f"a fault at each touch of the disk ({tried}): {counts}"

    def faults(self) -> list[str]:
        return self.report.faults()


def try_all(folder: Path, lines: int, every: int = 1) -> Faults:
    """Each kind at each `every`-th touch; a batch of its own each time, which has to come to its
    end."""
    faults = Faults()
    for number, make in enumerate((_make_fresh, _make_half_done, _make_cancelled)):
        source = folder / make.__name__
        source.mkdir()
        batch_id = make(source, lines)
        for kind in KINDS:
            at, touched = 1 + number * every // 3, True
            while touched:
                place = folder / f"{source.name} {kind} {at}"
                touched = _try(source, batch_id, place, lines, kind, at, faults.report)
                faults.tried[kind] += touched
                at += every
    return faults


def _make_fresh(folder: Path, lines: int) -> str:
    return make_batch(folder / "state", lines)


def _make_half_done(folder: Path, lines: int) -> str:
    """Half of its rows are in the journals, and its server was killed."""
    batch_id = make_batch(folder / "state", lines)
    status = sitting(
        folder / "state", batch_id, folder / "log", _RATE, limits=FAST, first=_die_half_way
    )
    assert os.WIFSIGNALED(status), "it was not killed"
    for name in ("output.jsonl", "errors.jsonl"):
        assert (folder / "state" / "batches" / batch_id / name).stat().st_size, (
            f"nothing of {name} was journaled"
        )
    return batch_id


def _make_cancelled(folder: Path, lines: int) -> str:
    return make_batch(folder / "state", lines, cancelled=True)


def _die_half_way() -> None:
    plain = BatchOutput.put

    def put(results: BatchOutput, outcomes: Sequence[LineOutcome]) -> None:
        plain(results, outcomes[::2])
        if (
            results.completed and results.failed
        ):  # bad ones come first, on a slow machine in a put of their own
            os.kill(os.getpid(), signal.SIGKILL)
        plain(results, outcomes[1::2])

    BatchOutput.put = put  # type: ignore[method-assign]


def _try(
    source: Path, batch_id: str, folder: Path, lines: int, kind: str, at: int, total: Report
) -> bool:
    """False where the batch ended before that many touches."""
    shutil.copytree(source, folder)
    count = os.open(folder / "count", os.O_RDWR | os.O_CREAT)
    os.pwrite(count, bytes(8), 0)
    touches = Touches(folder / "state", kind, at, count)
    # A folder that fails while it is opened refuses the start, in one line; a kill may come there
    # too.
    moment = "first" if kind.startswith("kill") else "once_open"
    hook: Any = {moment: lambda: stand_in_the_way(touches)}
    status = sitting(folder / "state", batch_id, folder / "log", _RATE, limits=FAST, **hook)
    touched = int.from_bytes(os.pread(count, 8, 0), "little")
    os.close(count)
    killed = os.WIFSIGNALED(status)
    assert killed == (kind.startswith("kill") and touched >= at) and (killed or status == 0), (
        f"{kind} {at}: {status}"
    )
    if killed:
        assert sitting(folder / "state", batch_id, folder / "log", _RATE, limits=FAST) == 0
    report = Report(lines=lines)
    read_end(folder / "state", batch_id, report, cancelled=source.name == _make_cancelled.__name__)
    for name in ("lost", "doubled", "torn"):
        setattr(total, name, getattr(total, name) + getattr(report, name))
    return touched >= at


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        began = time.monotonic()
        made = try_all(Path(place), int(sys.argv[1]) if len(sys.argv) > 1 else 30)
        print(made.line() + f"; {time.monotonic() - began:.0f} s")
        sys.exit(bool(made.faults()))
