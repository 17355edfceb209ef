"""The journal: rows survive kills whole, once, and nothing foreign is written over."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import disk as disk_room
from penstock import journal as journal_room
from penstock.disk import check_writable, why_not_written, write_whole
from penstock.errors import CapacityError, JournalError
from penstock.journal import COMMIT_SECONDS, Journal
from penstock.key_set import KeySet

RUN = {"model": "demo", "seed": 1}


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fill(path: Path, count: int) -> None:
    with Journal(path, RUN) as journal:
        for i in range(count):
            journal.add(i, {"id": i, "text": "x" * i})


def test_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    fill(out, 5)
    with Journal(out, RUN) as journal:
        assert [i in journal for i in range(6)] == [True] * 5 + [False]
        assert [row["id"] for row in journal.rows()] == [0, 1, 2, 3, 4]
        journal.add(5, {"id": 5})
    assert [row["id"] for row in read(out)] == [0, 1, 2, 3, 4, 5]


def test_a_key_is_written_once(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.jsonl", RUN) as journal:
        journal.add(["p", 1], {"a": 1})
        with pytest.raises(JournalError, match="already holds"):
            journal.add(["p", 1], {"a": 2})
        journal.add("p", {"a": 3})
    assert [row["a"] for row in read(tmp_path / "out.jsonl")] == [1, 3]


def test_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    fill(tmp_path / "out.jsonl", 2)
    with pytest.raises(JournalError, match=r"seed: 1 there, 2 now.*name another output") as caught:
        Journal(tmp_path / "out.jsonl", {"model": "demo", "seed": 2})
    assert "\n" not in str(caught.value)
    assert len(read(tmp_path / "out.jsonl")) == 2


def test_a_foreign_file_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine\n")
    with pytest.raises(JournalError, match="no run wrote it"):
        Journal(out, RUN)
    assert out.read_text() == "mine\n"
    assert not (tmp_path / "out.jsonl.journal").exists()


def test_taking_the_rows_away_begins_anew(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    fill(out, 5)
    out.unlink()
    with Journal(out, {"model": "other"}) as journal:
        assert len(journal) == 0
        journal.add(1, {"id": 1})
    assert read(out) == [{"id": 1}]


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with Journal(out, RUN) as journal:
        with pytest.raises(JournalError, match="in use by another run"):
            Journal(out, RUN)
        journal.add(1, {"id": 1})
    assert read(out) == [{"id": 1}]


def test_an_error_before_the_first_row_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Journal(tmp_path / "out.jsonl", RUN):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_device_is_named() -> None:
    with (
        open("/dev/full", "wb", buffering=0) as full,
        pytest.raises(OSError, match="No space") as caught,
    ):
        journal_room._write(full, b"x")
    assert isinstance(why_not_written(caught.value, Path("/dev/full")), CapacityError)


def test_text_of_any_kind_stays_on_its_line(tmp_path: Path) -> None:
    texts = ["a\nb\r\n", "\u2028\u2029\x85", "\ud800 half", "日本 🙂", "\x00"]
    with Journal(tmp_path / "out.jsonl", RUN) as journal:
        for text in texts:
            journal.add(text, {"text": text})
    assert [row["text"] for row in read(tmp_path / "out.jsonl")] == texts
    with Journal(tmp_path / "out.jsonl", RUN) as journal:
        assert all(text in journal for text in texts)


def test_check_writable_and_write_whole(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.jsonl")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(JournalError, match="is no folder"):
        check_writable(tmp_path / "none" / "out.jsonl")
    with pytest.raises(JournalError, match="is a folder"):
        check_writable(tmp_path)
    write_whole(tmp_path / "a.json", b"1")
    write_whole(tmp_path / "a.json", b"22")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a.json", b"22")]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.journal"])
def test_what_is_no_file_is_refused_and_stays(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    if name == "out.jsonl":
        with pytest.raises(JournalError, match="is a device, a pipe or a socket: name a file"):
            check_writable(tmp_path / name)
    with pytest.raises(JournalError, match="is a device, a pipe or a socket: name a file"):
        Journal(tmp_path / "out.jsonl", RUN)
    assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).is_fifo()


def test_a_run_that_wrote_nothing_takes_no_foreign_file_away(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name in ("empty", "new"):
        with pytest.raises(InterruptedError), Journal(tmp_path / name, RUN):
            raise InterruptedError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


@given(st.lists(st.one_of(st.text(max_size=3), st.integers(-3, 3)), max_size=80))
def test_key_set_is_a_set(keys: list[str | int]) -> None:
    ours, plain = KeySet(), set[tuple[type, str | int]]()
    for key in keys:
        assert ours.add(key) == ((type(key), key) not in plain)
        plain.add((type(key), key))
    assert len(ours) == len(plain)
    assert all(key in ours for _, key in plain)


def test_key_set_grows() -> None:
    keys = KeySet()
    assert all(keys.add(i) for i in range(5000))
    assert not any(keys.add(i) for i in range(5000))
    assert 5000 not in keys and "1" not in keys


@pytest.mark.parametrize("left", [b"12", b"a1b2c3d4 penstock-jour", bytes(60)])
def test_a_header_that_a_power_cut_tore_is_begun_anew(tmp_path: Path, left: bytes) -> None:
    out = tmp_path / "out.jsonl"
    out.touch()
    (tmp_path / "out.jsonl.journal").write_bytes(left)
    fill(out, 3)
    assert len(read(out)) == 3
    (tmp_path / "out.jsonl.journal").write_bytes(left)
    with pytest.raises(JournalError, match="no journal"):
        Journal(out, RUN)


def test_rows_that_are_json_already_are_taken_as_they_are(tmp_path: Path) -> None:
    with Journal(tmp_path / "out.jsonl", RUN) as journal:
        journal.add_json("a", '{"x": "\u2028\u2029\x85é"}'.encode())
    assert (tmp_path / "out.jsonl").read_bytes() == b'{"x": "\\u2028\\u2029\\u0085\xc3\xa9"}\n'
    assert read(tmp_path / "out.jsonl") == [{"x": "\u2028\u2029\x85é"}]


@pytest.mark.parametrize("put", ["moved", "deleted", "replaced"])
def test_rows_that_nobody_would_find_are_told(tmp_path: Path, put: str) -> None:
    """The file goes while a run writes it; nothing waits when the run asks whether all of it is
    there."""
    out, there = tmp_path / "out.jsonl", tmp_path / "there.jsonl"
    with (
        pytest.raises(JournalError, match=r"out\.jsonl was moved, deleted or replaced"),
        Journal(out, RUN) as journal,
    ):
        journal.add(1, {"id": 1})
        journal.commit()
        journal.commit()
        if put == "deleted":
            out.unlink()
        else:
            out.rename(there)
        if put == "replaced":
            out.write_text("somebody's\n")
        journal.commit()
    if put == "replaced":
        assert out.read_text() == "somebody's\n"
        out.unlink()
    if put != "deleted":
        there.rename(out)
        assert [row["id"] for row in read(out)] == [1]
        with Journal(out, RUN) as journal:
            assert 1 in journal


def test_what_came_in_the_place_of_a_run_s_files_is_not_taken_away(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(JournalError, match="replaced"), Journal(out, RUN):
        for name in ("new.jsonl", "new.journal"):
            (tmp_path / name).write_text("somebody's\n")
        (tmp_path / "new.jsonl").rename(out)
        (tmp_path / "new.journal").rename(tmp_path / "out.jsonl.journal")
        raise ZeroDivisionError
    assert {path.read_text() for path in tmp_path.iterdir()} == {"somebody's\n"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.journal"]


def test_a_whole_file_s_name_is_brought_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[Path, bytes]] = []
    path = tmp_path / "a.json"
    monkeypatch.setattr(
        disk_room, "sync_folder", lambda folder: synced.append((folder, path.read_bytes()))
    )
    write_whole(path, b"1")
    assert synced == [(tmp_path, b"1")]


# --- when rows come to the disk, by a clock that the test turns


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
        assert (vouched(out), clock.syncs) == (0, before), (
            "a group is one sync of either file, not the first row's"
        )
        assert journal.tick()
        assert (vouched(out), clock.syncs) == (512, before + 2)
        journal.add(512, {"id": 512})
        for _ in range(4):
            clock.now += COMMIT_SECONDS / 5
            assert not journal.tick()
        assert (vouched(out), clock.syncs) == (512, before + 2), (
            "a group waits for more rows to share its sync with"
        )
        clock.now += COMMIT_SECONDS / 4
        assert journal.tick()
        assert (vouched(out), clock.syncs) == (513, before + 4)
        clock.now += 60
        assert journal.tick()
        assert clock.syncs == before + 4, "a tick with nothing to bring touches no disk"


def test_many_rows_are_a_group_without_a_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_room, "COMMIT_BYTES", 1000)
    monkeypatch.setattr(journal_room, "COMMIT_ROWS", 10)
    out = tmp_path / "out.jsonl"
    with Journal(out, RUN) as journal:
        for i in range(25):
            journal.add(i, {"id": i})
        assert vouched(out) == 20
        journal.add("long", {"text": "x" * 1000})
        assert vouched(out) == 26 and journal.tick()
