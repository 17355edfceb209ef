"""Files and batches as rows in SQLite (WAL, synced at each commit); each change is one transaction.
Used by one thread. Knows the tables; the file store holds contents, the journals results."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import UsageError

VERSION = 6  # version of the tables, stored in the database
OVER = ("completed", "failed", "cancelled", "expired")  # final statuses
ON_ITS_WAY = ("validating", "in_progress", "finalizing", "cancelling")  # all other statuses

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
"""  # one index per query: an owner's pages and counts, a file's user


@dataclass(slots=True, kw_only=True)
class FileRow:
    """One file. owner: name of the API key that it belongs to, "" without keys. sha256: of the
    uploaded content; None for results."""

    id: str
    owner: str
    created_at: int
    filename: str
    purpose: str
    bytes: int
    sha256: str | None = None


@dataclass(slots=True, kw_only=True)
class BatchRow:
    """One batch, with OpenAI's field names; *_at are Unix seconds. metadata and errors: JSON texts.
    Counts are numbers of lines.

    model: the served name of the model that the batch needs; None if any will do. suspects: lines
    that were at the engine when it died, as poison_lines writes them.
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
    """The database of one state folder. Each method is one transaction,
    and raises sqlite3.Error."""

    def __init__(self, path: Path, *, beside: bool = False) -> None:
        """beside: contents exist already, so a new database would lose track of them. Raises
        UsageError."""
        if beside and not (path.exists() and path.stat().st_size):
            raise _lost(path)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        # an earlier release may have made it readable, and it holds everybody's names and messages
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

    # --- files

    def add_file(self, row: FileRow) -> None:
        self._insert("files", [row])

    def file(self, file_id: str, owner: str) -> FileRow | None:
        return self._one(
            FileRow, "SELECT * FROM files WHERE id = ? AND owner = ?", (file_id, owner)
        )

    def list_files(
        self, owner: str, purpose: str | None, after: str | None, limit: int, order: str
    ) -> list[FileRow] | None:
        """Returns files in the order of creation (`order` asc or desc) after the file `after`; None
        if that is no file of this owner."""
        return self._page(FileRow, "files", owner, after, limit, order, purpose)

    def remove_file(self, file_id: str, owner: str) -> bool:
        """Returns False if the file doesn't exist."""
        return (
            self._db.execute(
                "DELETE FROM files WHERE id = ? AND owner = ?", (file_id, owner)
            ).rowcount
            == 1
        )

    def count_files(self, owner: str) -> int:
        return self._count("files WHERE owner = ?", owner)

    def user_of(self, file_id: str) -> str | None:
        """Returns the id of a batch that isn't over and reads this file, or None."""
        statement = f"SELECT id FROM batches WHERE input_file_id = ? AND status IN {ON_ITS_WAY}"
        found = self._db.execute(statement, (file_id,)).fetchone()
        return None if found is None else str(found["id"])

    # --- batches

    def add_batch(self, row: BatchRow) -> None:
        self._insert("batches", [row])

    def batch(self, batch_id: str, owner: str | None = None) -> BatchRow | None:
        """Returns a batch or None. owner None: of any owner."""
        if owner is None:
            return self._one(BatchRow, "SELECT * FROM batches WHERE id = ?", (batch_id,))
        return self._one(
            BatchRow, "SELECT * FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
        )

    def list_batches(self, owner: str, after: str | None, limit: int) -> list[BatchRow] | None:
        """Returns the newest first; None if `after` is no batch of this owner."""
        return self._page(BatchRow, "batches", owner, after, limit, "desc")

    def unfinished(self) -> list[BatchRow]:
        """Returns the batches that aren't over, oldest first."""
        rows = self._db.execute(
            f"SELECT * FROM batches WHERE status IN {ON_ITS_WAY} ORDER BY number"
        )
        return [_row(BatchRow, row) for row in rows]

    def count_unfinished(self, owner: str) -> int:
        return self._count(f"batches WHERE owner = ? AND status IN {ON_ITS_WAY}", owner)

    def move(self, batch_id: str, come_from: Sequence[str], status: str, **values: Any) -> bool:
        """Changes a batch's status if it is one of `come_from`, and sets `status`_at to now.
        Returns False otherwise."""
        values = {"status": status, f"{status}_at": int(time.time()), **values}
        sets = ", ".join(f"{name} = ?" for name in values)
        marks = ", ".join("?" for _ in come_from)
        statement = f"UPDATE batches SET {sets} WHERE id = ? AND status IN ({marks})"
        return self._db.execute(statement, (*values.values(), batch_id, *come_from)).rowcount == 1

    def note(self, batch_id: str, **values: Any) -> None:
        """Writes columns of a batch other than its status."""
        sets = ", ".join(f"{name} = ?" for name in values)
        self._db.execute(f"UPDATE batches SET {sets} WHERE id = ?", (*values.values(), batch_id))

    def finish(self, batch_id: str, status: str, files: Iterable[FileRow], **values: Any) -> None:
        """Ends a batch that isn't over and adds its files, in one transaction. values: further
        columns of the batch."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            if self.move(batch_id, ON_ITS_WAY, status, **values):
                self._insert("files", files)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # on a full disk SQLite rolls back by itself
                self._db.execute("ROLLBACK")
            raise

    def known(self) -> tuple[set[str], set[str], set[str]]:
        """Returns three sets of ids: all files, including results that are being named; batches
        whose folders stay, since they aren't over or failed (for an operator to look at); and
        batches whose folders can go."""
        files = {str(row["id"]) for row in self._db.execute("SELECT id FROM files")}
        kept, over = set[str](), set[str]()
        for batch_id, status, *named in self._db.execute(
            "SELECT id, status, output_file_id, error_file_id FROM batches"
        ):
            (kept if status in ON_ITS_WAY or status == "failed" else over).add(str(batch_id))
            if status in ON_ITS_WAY:
                files.update(str(name) for name in named if name is not None)
        return files, kept, over

    # --- helpers

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


def encoded(value: Any) -> str:
    """Returns a value as JSON text for a column."""
    return json.dumps(value, separators=(",", ":"))
