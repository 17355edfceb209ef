"""Two faults in a row, at every touch of the disk: what a journal leaves behind goes on, with each
row once.

A touch is a write, a sync, a cut or a removal. At one of them the disk fails, before or after the
call or in the middle of it, Ctrl-C comes, or the process is killed. A second sitting goes on, and
at a later touch of either the process dies or the power goes. A kill leaves what was written; a
power cut leaves of each file that, or what was last synced of it. `make reliability` tries every
pair of touches, here every third death takes its turn.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from fuzz_bounds import in_memory
from fuzz_inputs import SCALE

from penstock import journal as journal_room
from penstock.errors import PenstockError
from penstock.journal import Journal

RUN = {"model": "demo"}
KEYS = list(range(7))
ROWS = {key: {"id": key, "text": "日本" * (3 * key + 1)} for key in KEYS}
KINDS = ("EIO", "EIO after", "full", "short", "Ctrl-C", "Ctrl-C after", "kill", "kill after")
NEVER = 1 << 30
EVERY = 1 if SCALE > 1 else 3


class DeadError(BaseException):
    """The process is no more: nothing that it would do next reaches the disk."""


class Disk:
    """Counts touches; at the `at`-th it does what `kind` says, at the `death`-th the process dies.
    synced: what a power cut leaves of a file, by its name."""

    def __init__(self, kind: str, at: int, death: int) -> None:
        self.kind, self.at, self.death = kind, at, death
        self.touched, self.dead = 0, False
        self.files: list[FileIO] = []
        self.synced: dict[str, bytes] = {}

    def touch(self, call: Callable[..., Any], *values: Any, write: bool = False) -> Any:
        if self.dead:
            raise DeadError
        self.touched += 1
        if self.touched == self.death:
            if write:
                call(half(values[0]))
            self.dead = True
            raise DeadError
        return self._fault(call, *values, write=write) if self.touched == self.at else call(*values)

    def _fault(self, call: Callable[..., Any], *values: Any, write: bool) -> Any:
        result = None
        if write and self.kind in ("full", "short"):
            result = call(half(values[0]))
        elif self.kind == "short" or self.kind.endswith("after"):
            result = call(*values)
        if self.kind == "short":
            return result
        if self.kind.startswith("kill"):
            self.dead = True
            raise DeadError
        if self.kind.startswith("Ctrl-C"):
            raise KeyboardInterrupt
        raise OSError(errno.ENOSPC if self.kind == "full" else errno.EIO, "a test")

    def sync(self, handle: int) -> None:
        for file in self.files:
            if not file.closed and file.fileno() == handle:
                path = Path(os.fspath(file.name))
                self.synced[path.name] = path.read_bytes()

    def let_go(self) -> None:
        """As the end of a process does, of its files and their lock."""
        for file in self.files:
            file.close()
        self.files.clear()
        self.dead = False


class _File(FileIO):
    disk: Disk

    def write(self, data: Any) -> int:
        written: int = self.disk.touch(super().write, data, write=True)
        return written

    def truncate(self, size: int | None = None) -> int:
        cut: int = self.disk.touch(super().truncate, size)
        return cut


def half(data: Any) -> bytes:
    return bytes(data)[: len(data) // 2]


@contextlib.contextmanager
def stood_in_the_way(disk: Disk) -> Iterator[None]:
    """Every way of a journal to the disk."""
    kind: Any = type("File", (_File,), {"disk": disk})
    unlink = os.unlink

    def open_file(path: Any, mode: str, buffering: int, opener: Any) -> FileIO:
        file: FileIO = kind(path, mode.replace("b", ""), opener=opener)
        disk.files.append(file)
        return file

    def unlinked(path: Any) -> None:
        unlink(path)
        disk.synced.pop(Path(path).name, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_room, "open", open_file, raising=False)
        patch.setattr(os, "fsync", lambda handle: disk.touch(disk.sync, handle))
        patch.setattr(os, "unlink", lambda path: disk.touch(unlinked, path))
        yield


def sitting(out: Path, order: list[int], known: set[int]) -> None:
    """A job: adds the rows that are missing, two a group. known: gets those that are on the disk
    for certain."""
    with Journal(out, RUN) as journal:
        for place, key in enumerate(order):
            if key not in journal:
                journal.add(key, ROWS[key])
            if place % 2:
                journal.commit()
                known.update(order[: place + 1])


def two_sittings(out: Path, disk: Disk) -> set[int]:
    """The second one goes on in another order, as samples end in another. Gives the keys that are
    on the disk."""
    known: set[int] = set()
    with stood_in_the_way(disk):
        for order in (KEYS, KEYS[::-1]):
            with contextlib.suppress(PenstockError, KeyboardInterrupt, DeadError):
                sitting(out, order, known)
            disk.let_go()
            if disk.touched >= disk.death:
                break
    return known


def what_may_be_left(folder: Path, synced: dict[str, bytes]) -> list[dict[str, bytes]]:
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    choices = [sorted({written[name], synced.get(name, b"")}) for name in written]
    return [dict(zip(written, chosen, strict=True)) for chosen in itertools.product(*choices)]


def goes_on(out: Path, left: dict[str, bytes], known: set[int]) -> None:
    for path in out.parent.iterdir():
        path.unlink()
    for name, data in left.items():
        (out.parent / name).write_bytes(data)
    with Journal(out, RUN) as journal:
        there = [key for key in KEYS if key in journal]
        assert known.issubset(there), "a row that was on the disk is gone"
        for key in KEYS:
            if key not in there:
                journal.add(key, ROWS[key])
    rows = [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]]
    assert sorted(row["id"] for row in rows) == KEYS, "a row is missing, or there twice"
    assert all(row == ROWS[row["id"]] for row in rows)


def attempt(kind: str, at: int, death: int) -> tuple[int, int]:
    """Gives the touches that there were, and how many ends were gone on from."""
    with in_memory() as folder:
        out, disk = folder / "out.jsonl", Disk(kind, at, death)
        known = two_sittings(out, disk)
        ends = what_may_be_left(folder, disk.synced)
        for left in ends:
            goes_on(out, left, known)
    return disk.touched, len(ends)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_and_a_death_at_every_touch(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    tried = 0
    for at in itertools.count(1):
        last, ends = attempt(kind, at, NEVER)
        if last < at:
            break
        tried += ends
        for death in range(at + 1 + at % EVERY, last + 1, EVERY):
            tried += attempt(kind, at, death)[1]
    assert at > 25 and tried > 500 / EVERY, "the disk was touched that often"
