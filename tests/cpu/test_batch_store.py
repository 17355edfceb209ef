"""The store by itself: which folder can be no new one."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.server.batch_shelf import new_batch_id, new_file_id
from penstock.server.batch_state import State
from penstock.server.batch_store import BatchRow, FileRow


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
    state = State(folder)
    file_id, batch_id = new_file_id(), new_batch_id()
    if kind == "files":
        state.shelf.path(file_id).write_bytes(b"kept")
        state.store.add_file(
            FileRow(id=file_id, owner="", created_at=1, filename="a", purpose="batch", bytes=len(b"kept"))
        )
    else:
        state.store.add_batch(
            BatchRow(id=batch_id, owner="", created_at=1, endpoint="/v1/completions", input_file_id=file_id)
        )
        (state.shelf.batch_folder(batch_id) / "output.jsonl").write_bytes(b"kept")
    state.close()
    path = folder / "state.sqlite"
    database = path.read_bytes()
    harm(path)
    before = sorted(each for each in folder.rglob("*") if each.is_file())
    for _ in range(2):  # the first refusal makes no database that the second start would believe
        with pytest.raises(UsageError, match=r"state\.sqlite, which knows them, is missing or empty") as error:
            State(folder)
        assert error.value.param == "state_dir" and "\n" not in str(error.value)
    left = sorted(each for each in folder.rglob("*") if each.is_file())
    assert left == before
    path.write_bytes(database)
    State(folder).close()
    assert [each for each in (folder / kind).rglob("*") if each.is_file()] != []
