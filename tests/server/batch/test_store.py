"""The store by itself: what a request reads of the tables, which folder can be no new one."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.server.batch.database import BatchDatabase, BatchRow, FileRow
from penstock.server.batch.file_store import new_batch_id, new_file_id
from penstock.server.batch.state_folder import StateFolder

pytestmark = pytest.mark.torch

INPUT = new_file_id()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchDatabase]:
    made = BatchDatabase(tmp_path / "state.sqlite")
    yield made
    made.close()


def add(store: BatchDatabase, owner: str = "one", status: str | None = None) -> str:
    """A batch; with a status, one that got there."""
    batch_id = new_batch_id()
    row = BatchRow(id=batch_id, owner=owner, created_at=1, endpoint="/v1/completions", input_file_id=INPUT)
    store.add_batch(row)
    if status is not None:
        assert store.move(batch_id, ("validating",), status)
    return batch_id


def test_what_is_known_of_files_and_folders(store: BatchDatabase) -> None:
    going, failed, over = (add(store, status=status) for status in ("finalizing", "failed", "completed"))
    store.note(going, output_file_id="a", error_file_id="b")
    store.add_file(FileRow(id=INPUT, owner="", created_at=1, filename="a", purpose="batch", bytes=1))
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
def test_contents_without_their_database_are_left_alone(tmp_path: Path, kind: str, harm: Any) -> None:
    folder = tmp_path / "state"
    state = StateFolder(folder)
    file_id, batch_id = new_file_id(), add(state.database)
    if kind == "files":
        state.file_store.path(file_id).write_bytes(b"kept")
        state.database.add_file(
            FileRow(id=file_id, owner="", created_at=1, filename="a", purpose="batch", bytes=len(b"kept"))
        )
    else:
        (state.file_store.batch_folder(batch_id) / "output.jsonl").write_bytes(b"kept")
    state.close()
    path = folder / "state.sqlite"
    database = path.read_bytes()
    harm(path)
    before = sorted(each for each in folder.rglob("*") if each.is_file())
    for _ in range(2):  # the first refusal makes no database that the second start would believe
        with pytest.raises(UsageError, match=r"state\.sqlite, which knows them, is missing or empty") as error:
            StateFolder(folder)
        assert error.value.param == "state_dir" and "\n" not in str(error.value)
    left = sorted(each for each in folder.rglob("*") if each.is_file())
    assert left == before
    path.write_bytes(database)
    StateFolder(folder).close()
    assert [each for each in (folder / kind).rglob("*") if each.is_file()] != []
