"""When a journal brings rows to the disk, by a clock that the test turns: in groups, however little follows a row."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock import journal as journal_room
from penstock.journal import COMMIT_SECONDS, Journal

RUN = {"model": "demo"}


class Clock:
    """In the place of the journal's `time`; and the syncs of its files are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.syncs = 1000.0, 0
        monkeypatch.setattr(journal_room, "time", SimpleNamespace(monotonic=lambda: self.now))
        fsync = os.fsync

        def counted(handle: int) -> None:
            self.syncs += 1
            fsync(handle)

        monkeypatch.setattr(os, "fsync", counted)


def vouched(out: Path) -> int:
    """Rows that a kill at this moment would leave done."""
    return out.with_name(out.name + ".journal").read_bytes().count(b"\n") - 1


def test_rows_that_nothing_follows_are_on_the_disk_at_the_next_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 rows of a length end in one step, and the next ones in minutes: one group, in time."""
    out, clock = tmp_path / "out.jsonl", Clock(monkeypatch)
    with Journal(out, RUN) as journal:
        assert journal.tick(), "nothing waits"
        clock.now += 60
        before = clock.syncs
        for i in range(512):
            journal.add(i, {"id": i})
        assert (vouched(out), clock.syncs) == (0, before), "a group is one sync of either file, not the first row's"
        assert journal.tick()
        assert (vouched(out), clock.syncs) == (512, before + 2)
        journal.add(512, {"id": 512})
        for _ in range(4):
            clock.now += COMMIT_SECONDS / 5
            assert not journal.tick()
        assert (vouched(out), clock.syncs) == (512, before + 2), "a group waits for more rows to share its sync with"
        clock.now += COMMIT_SECONDS / 4
        assert journal.tick()
        assert (vouched(out), clock.syncs) == (513, before + 4)
        clock.now += 60
        assert journal.tick()
        assert clock.syncs == before + 4, "a tick with nothing to bring touches no disk"


def test_many_rows_are_a_group_without_a_tick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_room, "COMMIT_BYTES", 1000)
    monkeypatch.setattr(journal_room, "COMMIT_ROWS", 10)
    out = tmp_path / "out.jsonl"
    with Journal(out, RUN) as journal:
        for i in range(25):
            journal.add(i, {"id": i})
        assert vouched(out) == 20
        journal.add("long", {"text": "x" * 1000})
        assert vouched(out) == 26 and journal.tick()


def test_a_slow_disk_does_not_get_all_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync of seconds: between two there is work for COMMIT_SECONDS."""
    out, clock = tmp_path / "out.jsonl", Clock(monkeypatch)
    write = journal_room._write

    def slow(file: object, data: bytes) -> None:
        write(file, data)  # type: ignore[arg-type]
        clock.now += 3

    monkeypatch.setattr(journal_room, "_write", slow)
    with Journal(out, RUN) as journal:
        journal.add(1, {"id": 1})
        assert journal.tick()
        journal.add(2, {"id": 2})
        assert not journal.tick()
        clock.now += COMMIT_SECONDS
        assert journal.tick() and vouched(out) == 2
