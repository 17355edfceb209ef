"""What a batch leaves on the disk. Its journals: cut at every byte of their tails, they go on; what
cannot be theirs is refused (`make reliability` cuts at every byte, `make test` at every seventh).
The store by itself: what a request reads of the tables, which folder can be no new one."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzz_bounds import in_memory
from fuzz_inputs import SCALE

from penstock.errors import JournalError, UsageError
from penstock.key_set import KeySet
from penstock.server.batch.database import BatchDatabase, BatchRow, FileRow
from penstock.server.batch.file_store import new_batch_id, new_file_id
from penstock.server.batch.output_files import BatchOutput, LineOutcome, answered, unrun
from penstock.server.batch.state_folder import StateFolder

pytestmark = pytest.mark.torch

BATCH = "batch_" + "0" * 32
FILES = ("output.jsonl.journal", "errors.jsonl.journal", "output.jsonl", "errors.jsonl")
TAIL, EVERY = 4096, 1 if SCALE > 1 else 7
COUNT = 80


def outcomes(count: int) -> list[LineOutcome]:
    body = [
        json.dumps({"text": "\u2028é" * (i % 7), "i": i}, ensure_ascii=False).encode()
        for i in range(count)
    ]
    return [
        answered(f"row {i}", 400 if i % 5 == 0 else 200, f"req_{i}", body[i]) for i in range(count)
    ]


def written(folder: Path, count: int) -> None:
    folder.mkdir()
    results = BatchOutput(folder, BATCH)
    for at in range(0, count, 7):
        results.put(outcomes(count)[at : at + 7])
    results.close()


def rows_of(folder: Path) -> list[str]:
    lines = (folder / "output.jsonl").read_bytes() + (folder / "errors.jsonl").read_bytes()
    assert lines.endswith(b"\n")
    return [json.loads(line)["custom_id"] for line in lines.split(b"\n")[:-1]]


@pytest.mark.parametrize("file", FILES)
def test_cut_at_any_byte_of_its_tail_it_goes_on(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    with in_memory() as place:
        written(place / "batch", COUNT)
        whole = {path.name: path.read_bytes() for path in (place / "batch").iterdir()}
        size = len(whole[file])
        for left in range(size - 1, max(size - TAIL, 1) - 1, -EVERY):
            for name, data in whole.items():
                (place / "batch" / name).write_bytes(data[:left] if name == file else data)
            said = refusal(file, whole[file], left)
            if said is None:
                goes_on(place / "batch")
            else:
                with pytest.raises(JournalError, match=said):
                    BatchOutput(place / "batch", BATCH)


def refusal(file: str, whole: bytes, left: int) -> str | None:
    """What is said of a file of which so many bytes are left, where it isn't taken up."""
    if not file.endswith(".journal"):
        return "was changed since"  # rows that were vouched for are gone: somebody took them
    # the header was synced before any row
    return "no journal" if left <= whole.index(b"\n") else None


def goes_on(folder: Path) -> None:
    every = outcomes(COUNT)
    results = BatchOutput(folder, BATCH)
    missing = [outcome for outcome in every if not results.has(outcome.key)]
    assert results.completed + results.failed == COUNT - len(missing) < COUNT
    results.put(missing)
    results.close()
    assert sorted(rows_of(folder)) == sorted(outcome.key for outcome in every)


def test_one_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    written(tmp_path / "whole", 10)
    results = BatchOutput(tmp_path / "whole", BATCH)
    results.put(outcomes(12))
    results.close()
    assert len(rows_of(tmp_path / "whole")) == 12


def test_a_folder_of_another_batch_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "whole", 10)
    with pytest.raises(JournalError, match="other settings"):
        BatchOutput(tmp_path / "whole", "batch_" + "1" * 32)


def test_a_line_without_a_custom_id_has_its_number_for_a_key(tmp_path: Path) -> None:
    (tmp_path / "batch").mkdir()
    results = BatchOutput(tmp_path / "batch", BATCH)
    results.put([answered("7", 400, "req_7", b"{}"), unrun(7, "invalid_json_line", "line 7: no")])
    results.close()
    for _ in range(2):
        results = BatchOutput(tmp_path / "batch", BATCH)
        assert results.has(7) and results.has("7") and not results.has(8) and results.failed == 2
        results.put([unrun(7, "invalid_json_line", "line 7: no")])
        results.close()
    named, nameless = map(
        json.loads, (tmp_path / "batch" / "errors.jsonl").read_text().splitlines()
    )
    assert (
        named["custom_id"] == "7"
        and named["error"] is None
        and named["response"]["status_code"] == 400
    )
    assert nameless.pop("id").startswith("batch_req_")
    said = {"code": "invalid_json_line", "message": "line 7: no"}
    assert nameless == {"custom_id": None, "response": None, "error": said}


def test_keys_are_found_while_another_thread_adds_some() -> None:
    keys, over = KeySet(), threading.Event()
    assert keys.add("first")

    def add() -> None:
        for number in range(60_000):
            keys.add(number)
        over.set()

    adding = threading.Thread(target=add)
    adding.start()
    while not over.is_set():
        assert "first" in keys
    adding.join()
    assert len(keys) == 60_001


# --- the store


INPUT = new_file_id()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchDatabase]:
    made = BatchDatabase(tmp_path / "state.sqlite")
    yield made
    made.close()


def add(store: BatchDatabase, owner: str = "one", status: str | None = None) -> str:
    """A batch; with a status, one that got there."""
    batch_id = new_batch_id()
    row = BatchRow(
        id=batch_id, owner=owner, created_at=1, endpoint="/v1/completions", input_file_id=INPUT
    )
    store.add_batch(row)
    if status is not None:
        assert store.move(batch_id, ("validating",), status)
    return batch_id


def test_what_is_known_of_files_and_folders(store: BatchDatabase) -> None:
    going, failed, over = (
        add(store, status=status) for status in ("finalizing", "failed", "completed")
    )
    store.note(going, output_file_id="a", error_file_id="b")
    store.add_file(
        FileRow(id=INPUT, owner="", created_at=1, filename="a", purpose="batch", bytes=1)
    )
    assert store.known() == ({INPUT, "a", "b"}, {going, failed}, {over})


class Planned:
    """A database that says how it would do what it is asked."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self.plans: list[tuple[str, str]] = []

    def execute(self, statement: str, values: Any = ()) -> sqlite3.Cursor:
        if statement.startswith(("SELECT", "UPDATE", "DELETE")):
            plan = self._database.execute(f"EXPLAIN QUERY PLAN {statement}", values)
            self.plans += [(statement, row["detail"]) for row in plan]
        return self._database.execute(statement, values)


def test_no_request_reads_a_whole_table(store: BatchDatabase) -> None:
    """Nor sorts what it has read: one thread does all that is asked of it."""
    over = add(store, status="completed")
    plain = store._db
    planned = Planned(plain)
    store._db = planned  # type: ignore[assignment]
    store.count_files("one")
    store.file(INPUT, "one")
    store.list_files("one", None, INPUT, 10, "desc")
    store.list_files("one", "batch", None, 10, "asc")
    store.user_of(INPUT)
    store.count_unfinished("one")
    store.list_batches("one", over, 10)
    store.list_batches("one", None, 10)
    store.move(over, ("completed",), "completed")
    store.note(over, errors="{}")
    store.batch(over, "one")
    store.move(over, ("completed",), "completed", output_file_id=INPUT)
    store.remove_file(INPUT, "one")
    store._db = plain
    assert len(planned.plans) >= 12
    for statement, how in planned.plans:
        assert not how.startswith("SCAN ") and "TEMP B-TREE" not in how, (statement, how)


# -- a folder without its database


def _missing(path: Path) -> None:
    path.unlink()


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _never_written(path: Path) -> None:
    path.unlink()
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = WAL")
    database.close()
    assert path.stat().st_size > 0


@pytest.mark.parametrize("harm", [_missing, _empty, _never_written])
@pytest.mark.parametrize("kind", ["files", "batches"])
def test_contents_without_their_database_are_left_alone(
    tmp_path: Path, kind: str, harm: Any
) -> None:
    folder = tmp_path / "state"
    state = StateFolder(folder)
    file_id, batch_id = new_file_id(), add(state.database)
    if kind == "files":
        state.file_store.path(file_id).write_bytes(b"kept")
        state.database.add_file(
            FileRow(
                id=file_id,
                owner="",
                created_at=1,
                filename="a",
                purpose="batch",
                bytes=len(b"kept"),
            )
        )
    else:
        (state.file_store.batch_folder(batch_id) / "output.jsonl").write_bytes(b"kept")
    state.close()
    path = folder / "state.sqlite"
    database = path.read_bytes()
    harm(path)
    before = sorted(each for each in folder.rglob("*") if each.is_file())
    for _ in range(2):  # the first refusal makes no database that the second start would believe
        with pytest.raises(
            UsageError, match=r"state\.sqlite, which knows them, is missing or empty"
        ) as error:
            StateFolder(folder)
        assert error.value.param == "state_dir" and "\n" not in str(error.value)
    left = sorted(each for each in folder.rglob("*") if each.is_file())
    assert left == before
    path.write_bytes(database)
    StateFolder(folder).close()
    assert [each for each in (folder / kind).rglob("*") if each.is_file()] != []
