"""The results of one batch: two journals, one of outputs and one of errors; an input's line is in one of them, once.

A line's key is its custom_id or, where it has none, its number. The journals' data files hold the lines that clients
fetch, so finishing is giving them a name. Everything that touches the disk blocks: it is called in threads, one at a
time. It knows the lines' shape, the journal, a batch's row and the file store; no engine.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.journal import Journal
from penstock.server.batch.database import BatchRow, FileRow, encoded
from penstock.server.batch.file_store import FileStore

OUTPUT, ERRORS = "output.jsonl", "errors.jsonl"
_encode = msgspec.json.encode


@dataclass(slots=True)
class LineResult:
    """What became of a request: `body` is the answer's JSON, an error's where status isn't 200."""

    custom_id: str
    status: int
    request_id: str
    body: bytes

    @property
    def key(self) -> str:
        return self.custom_id

    @property
    def good(self) -> bool:
        return self.status == 200

    def line(self) -> bytes:
        """Returns the line of the output or error file, without its end."""
        response = b'{"status_code":%d,"request_id":' % self.status + _encode(self.request_id)
        return _line(self.custom_id, response + b',"body":' + self.body + b"}", b"null")


@dataclass(slots=True)
class UnrunLine:
    """What is said of a line that became no request: one without a custom_id of its own, whose key is its number, and
    one that a cancel came before."""

    key: str | int
    code: str
    message: str

    good = False

    @property
    def body(self) -> bytes:
        return _encode({"code": self.code, "message": self.message})

    def line(self) -> bytes:
        """Returns the line of the error file, without its end."""
        return _line(self.key if isinstance(self.key, str) else None, b"null", self.body)


def _line(custom_id: str | None, response: bytes, error: bytes) -> bytes:
    pieces = (
        b'{"id":"batch_req_' + secrets.token_hex(16).encode(),
        b'","custom_id":' + _encode(custom_id),
        b',"response":' + response,
        b',"error":' + error + b"}",
    )
    return b"".join(pieces)


class BatchOutput:
    """Opens where a killed server left off. Every method raises JournalError, CapacityError; after either it is closed,
    and opened again it goes on: what was committed is there, once."""

    def __init__(self, folder: Path, batch_id: str) -> None:
        self._output = Journal(folder / OUTPUT, {"batch": batch_id, "holds": "output"})
        try:
            self._errors = Journal(folder / ERRORS, {"batch": batch_id, "holds": "errors"})
        except BaseException:
            self._output.close()
            raise
        self.completed, self.failed = len(self._output), len(self._errors)

    def has(self, key: str | int) -> bool:
        """Returns whether a line has its outcome; while another thread writes, too."""
        return key in self._output or key in self._errors

    def put(self, outcomes: Sequence[LineResult | UnrunLine]) -> None:
        """Brings outcomes to the disk, and counts them then; none that is there is written again."""
        for outcome in outcomes:
            journal = self._output if outcome.good else self._errors
            if outcome.key not in journal:
                journal.add_json(outcome.key, outcome.line())
        for journal in (self._output, self._errors):
            journal.commit()
        self.completed, self.failed = len(self._output), len(self._errors)

    def close(self) -> None:
        try:
            self._output.close()
        finally:
            self._errors.close()


# --- the end of a batch


def adopt_output(store: FileStore, row: BatchRow) -> list[FileRow]:
    """Makes closed results the files of the ids that the row has; again, where a kill came between. Raises OSError."""
    folder = store.batch_folder(row.id)
    named = ((row.output_file_id, OUTPUT), (row.error_file_id, ERRORS))
    return [_file(row, file_id, name, store.adopt(folder / name, file_id)) for file_id, name in named if file_id]


def lend_output(store: FileStore, row: BatchRow, ids: tuple[str, str]) -> tuple[list[FileRow], dict[str, Any]]:
    """Makes files, under these ids, of what is done of a batch that fails, and returns them and the columns that say
    so; again, where the disk failed before. What it wrote stays in its folder too, for whoever looks into it. Raises
    OSError, PenstockError."""
    folder = store.batch_folder(row.id)
    output = BatchOutput(folder, row.id)
    output.close()
    files, columns = [], dict[str, Any](completed=output.completed, failed=output.failed)
    named = (("output_file_id", OUTPUT, output.completed), ("error_file_id", ERRORS, output.failed))
    for (column, name, count), file_id in zip(named, ids, strict=True):
        if count:
            columns[column] = file_id
            files.append(_file(row, file_id, name, store.adopt(folder / name, file_id, keep_source=True)))
    return files, columns


def error_list(errors: Sequence[dict[str, Any]]) -> str:
    """Returns OpenAI's list of a batch's errors, for its column."""
    return encoded({"object": "list", "data": errors})


def with_fault(errors: str | None, code: str, message: str) -> str:
    """Returns such a list with one error of the whole batch before those of its lines."""
    earlier = [] if errors is None else json.loads(errors)["data"]
    return error_list([{"code": code, "line": None, "message": message, "param": None}, *earlier])


def more_errors(batch_id: str) -> str:
    """Returns such a list where a list of batches has no room for a batch's own."""
    message = f"these errors are too long for a list of batches: GET /v1/batches/{batch_id} has them"
    return error_list([{"code": "more_errors", "line": None, "message": message, "param": None}])


def _file(row: BatchRow, file_id: str, name: str, size: int) -> FileRow:
    return FileRow(
        id=file_id, owner=row.owner, created_at=int(time.time()), filename=f"{row.id}_{name}", purpose="batch_output",
        bytes=size,
    )  # fmt: skip
