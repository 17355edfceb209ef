"""The SQLite tables of files and batches. WAL mode, synced at each commit; each change is one
transaction. Used by one thread. Knows the tables; the file store has the files' contents, the
journals the results."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from penstock.errors import UsageError

VERSION = 6  # version of the table definitions, stored in the database
OVER = ("completed", "failed", "cancelled", "expired")  # statuses of batches that have ended
# statuses of batches that have not ended
ON_ITS_WAY = ("validating", "in_progress", "finalizing", "cancelling")

_TABLES = """
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, created_at INTEGER NOT NULL,
    filename TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL, sha256 TEXT
);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, created_at INTEGER NOT NULL,
    endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL, metadata TEXT, status TEXT NOT NULL, errors TEXT,
    output_file_id TEXT, error_file_id TEXT, in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER,
    failed_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    model TEXT, suspects TEXT
);
CREATE INDEX batches_status ON batches (status);
CREATE INDEX files_owner ON files (owner);
CREATE INDEX batches_owner ON batches (owner);
CREATE INDEX batches_standing ON batches (owner, status);
CREATE INDEX batches_input ON batches (input_file_id, status);
"""  # one index each for an owner's pages and counts, and for the batch that uses a file


@dataclass(slots=True, kw_only=True)
class FileRow:
    """A row of the table of files. owner: name of the API key that the file belongs to; "" without
    keys. sha256: hash of the uploaded content; None for result files."""

    id: str
    owner: str
    created_at: int
    filename: str
    purpose: str
    bytes: int
    sha256: str | None = None


@dataclass(slots=True, kw_only=True)
class BatchRow:
    """A row of the table of batches, with OpenAI's field names. *_at: Unix seconds. metadata,
    errors: JSON texts. total, completed, failed: numbers of lines.

    model: served name of the model that the batch needs; None: any model. suspects: lines that were
    at the engine when it died, in the format of poison_lines.py.
    """

    id: str
    owner: str
    created_at: int
    endpoint: str
    input_file_id: str
    metadata: str | None = None
    status: str = "validating"
    errors: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    model: str | None = None
    suspects: str | None = None

    @property
    def over(self) -> bool:
        return self.status in OVER


Row = TypeVar("Row", FileRow, BatchRow)


class BatchDatabase:
    """The database of one server's files and batches. Each method is one transaction, and raises
    sqlite3.Error."""

    def __init__(self, path: Path, *, beside: bool = False) -> None:
        """beside: True if the folder has file contents already, so that a missing database is an
        error. Raises UsageError."""
        if beside and not (path.exists() and path.stat().st_size):
            raise _lost(path)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        # only the owner may read it, since it has all clients' names and messages; earlier releases
        # may have allowed more
        path.chmod(0o600)
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and beside:
            self._db.close()
            raise _lost(path)
        if version == 0:
            self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
            version = VERSION
        if version != VERSION:
            self._db.close()
            raise UsageError(
                f"the state folder was written by another version of penstock (tables {version},"
                f" here {VERSION}): name another folder",
                param="state_dir",
            )

    def close(self) -> None:
        self._db.close()

    # --- the table of files

    def add_file(self, row: FileRow) -> None:
        self._insert("files", [row])

    def file(self, file_id: str, owner: str) -> FileRow | None:
        return self._one(
            FileRow, "SELECT * FROM files WHERE id = ? AND owner = ?", (file_id, owner)
        )

    def list_files(
        self, owner: str, purpose: str | None, after: str | None, limit: int, order: str
    ) -> list[FileRow] | None:
        """Returns the owner's files in the order of creation (`order` asc or desc), beginning after
        the file with the id `after`. Returns None if this owner has no such file."""
        return self._page(FileRow, "files", owner, after, limit, order, purpose)

    def remove_file(self, file_id: str, owner: str) -> bool:
        """Deletes a file's row. Returns False if this owner has no such file."""
        return (
            self._db.execute(
                "DELETE FROM files WHERE id = ? AND owner = ?", (file_id, owner)
            ).rowcount
            == 1
        )

    def count_files(self, owner: str) -> int:
        return self._count("files WHERE owner = ?", owner)

    def user_of(self, file_id: str) -> str | None:
        """Returns the id of an unfinished batch that reads this file, or None."""
        statement = f"SELECT id FROM batches WHERE input_file_id = ? AND status IN {ON_ITS_WAY}"
        found = self._db.execute(statement, (file_id,)).fetchone()
        return None if found is None else str(found["id"])

    # --- the table of batches

    def add_batch(self, row: BatchRow) -> None:
        self._insert("batches", [row])

    def batch(self, batch_id: str, owner: str | None = None) -> BatchRow | None:
        """Returns a batch, or None if there is no such batch. owner: the batch must belong to this
        owner; None: any."""
        if owner is None:
            return self._one(BatchRow, "SELECT * FROM batches WHERE id = ?", (batch_id,))
        return self._one(
            BatchRow, "SELECT * FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
        )

    def list_batches(self, owner: str, after: str | None, limit: int) -> list[BatchRow] | None:
        """Returns the owner's batches, newest first, beginning after the batch with the id `after`.
        Returns None if this owner has no such batch."""
        return self._page(BatchRow, "batches", owner, after, limit, "desc")

    def unfinished(self) -> list[BatchRow]:
        """Returns the unfinished batches, oldest first."""
        rows = self._db.execute(
            f"SELECT * FROM batches WHERE status IN {ON_ITS_WAY} ORDER BY number"
        )
        return [_row(BatchRow, row) for row in rows]

    def count_unfinished(self, owner: str) -> int:
        return self._count(f"batches WHERE owner = ? AND status IN {ON_ITS_WAY}", owner)

    def move(self, batch_id: str, come_from: Sequence[str], status: str, **values: Any) -> bool:
        """Changes a batch's status if it now is one of `come_from`, sets the column of the time
        ({status}_at) to now, and returns True. Returns False otherwise. values: further columns to
        set."""
        values = {"status": status, f"{status}_at": int(time.time()), **values}
        sets = ", ".join(f"{name} = ?" for name in values)
        marks = ", ".join("?" for _ in come_from)
        statement = f"UPDATE batches SET {sets} WHERE id = ? AND status IN ({marks})"
        return self._db.execute(statement, (*values.values(), batch_id, *come_from)).rowcount == 1

    def note(self, batch_id: str, **values: Any) -> None:
        """Sets columns of a batch other than its status."""
        sets = ", ".join(f"{name} = ?" for name in values)
        self._db.execute(f"UPDATE batches SET {sets} WHERE id = ?", (*values.values(), batch_id))

    def finish(self, batch_id: str, status: str, files: Iterable[FileRow], **values: Any) -> None:
        """Ends an unfinished batch and adds its result files, in one transaction. values: further
        columns of the batch to set."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            if self.move(batch_id, ON_ITS_WAY, status, **values):
                self._insert("files", files)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # on a full disk SQLite has rolled back by itself
                self._db.execute("ROLLBACK")
            raise

    def known(self) -> tuple[set[str], set[str], set[str]]:
        """Returns three sets of ids: all files, including results that get their ids just now;
        batches whose folders must stay, since they are unfinished or have failed (an operator may
        look at them); and batches whose folders can be removed."""
        files = {str(row["id"]) for row in self._db.execute("SELECT id FROM files")}
        kept, over = set[str](), set[str]()
        for batch_id, status, *named in self._db.execute(
            "SELECT id, status, output_file_id, error_file_id FROM batches"
        ):
            (kept if status in ON_ITS_WAY or status == "failed" else over).add(str(batch_id))
            if status in ON_ITS_WAY:
                files.update(str(name) for name in named if name is not None)
        return files, kept, over

    # --- helpers for both tables

    def _insert(self, table: str, rows: Iterable[FileRow | BatchRow]) -> None:
        for row in rows:
            names = [field.name for field in fields(row)]
            marks = ", ".join("?" for _ in names)
            values = [getattr(row, name) for name in names]
            self._db.execute(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})", values)

    def _one(self, kind: type[Row], statement: str, values: Sequence[Any]) -> Row | None:
        found = self._db.execute(statement, values).fetchone()
        return None if found is None else _row(kind, found)

    def _count(self, what: str, owner: str) -> int:
        return int(self._db.execute(f"SELECT count(*) FROM {what}", (owner,)).fetchone()[0])

    def _page(
        self,
        kind: type[Row],
        table: str,
        owner: str,
        after: str | None,
        limit: int,
        order: str,
        purpose: str | None = None,
    ) -> list[Row] | None:
        where = "owner = ?"
        values: list[Any] = [owner]
        if purpose is not None:
            where += " AND purpose = ?"
            values.append(purpose)
        if after is not None:
            if (
                self._db.execute(
                    f"SELECT 1 FROM {table} WHERE id = ? AND owner = ?", (after, owner)
                ).fetchone()
                is None
            ):
                return None
            behind = ">" if order == "asc" else "<"
            where += f" AND number {behind} (SELECT number FROM {table} WHERE id = ?)"
            values.append(after)
        statement = (
            f"SELECT * FROM {table} WHERE {where} ORDER BY number"
            f" {'ASC' if order == 'asc' else 'DESC'} LIMIT ?"
        )
        return [_row(kind, row) for row in self._db.execute(statement, [*values, limit])]


def _lost(path: Path) -> UsageError:
    return UsageError(
        f"the state folder {path.parent} holds files or batches, and {path.name}, which knows them,"
        " is missing or empty: put it back, or name another folder",
        param="state_dir",
    )


def _row(kind: type[Row], row: sqlite3.Row) -> Row:
    return kind(**{field.name: row[field.name] for field in fields(kind)})


class BatchError(msgspec.Struct, kw_only=True):
    """An error of a batch. line: number of the line; None: the whole batch's."""

    code: str
    line: int | None
    message: str
    param: str | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    """OpenAI's list of a batch's errors."""

    object: Literal["list"] = "list"
    data: list[BatchError]


def encoded(value: Any) -> str:
    """Returns a value as JSON text for a column."""
    return json.dumps(value, separators=(",", ":"))
