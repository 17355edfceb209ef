"""The result journals of one batch. One has the outputs and one the errors; each input line is in
exactly one.

A line's key is its custom_id, or its number if it has none. The journals' data files hold the lines
that clients fetch, so that finishing a batch only renames them. Disk access blocks: it runs in
threads, one call at a time. Knows the format of result lines, the journal, a batch's row and the
file store; no engine.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.journal import Journal
from penstock.server.batch.database import BatchError, BatchErrors, BatchRow, FileRow, encoded
from penstock.server.batch.file_store import FileStore

OUTPUT, ERRORS = "output.jsonl", "errors.jsonl"
_encode = msgspec.json.encode


@dataclass(slots=True)
class LineOutcome:
    """Result of an input line. key: its custom_id, or its number if it has none of its own. good:
    True for the output file, False for the error file. text: the result's line in that file,
    without a newline."""

    key: str | int
    good: bool
    text: bytes


def answered(custom_id: str, status: int, request_id: str, body: bytes) -> LineOutcome:
    """Returns the outcome of a line that ran as a request. body: JSON of the answer, or of the
    error if status isn't 200."""
    response = b'{"status_code":%d,"request_id":%b,"body":%b}' % (status, _encode(request_id), body)
    return LineOutcome(custom_id, status == 200, _line(custom_id, response, b"null"))


def unrun(key: str | int, code: str, message: str) -> LineOutcome:
    """Returns the outcome of a line that didn't run: it has no custom_id of its own, or was
    cancelled before."""
    custom_id = key if isinstance(key, str) else None
    return LineOutcome(
        key, False, _line(custom_id, b"null", _encode({"code": code, "message": message}))
    )


def _line(custom_id: str | None, response: bytes, error: bytes) -> bytes:
    line_id = secrets.token_hex(16).encode()
    pieces = (line_id, _encode(custom_id), response, error)
    return b'{"id":"batch_req_%b","custom_id":%b,"response":%b,"error":%b}' % pieces


class BatchOutput:
    """The two result journals of a batch. Opening them continues what an earlier server wrote. All
    methods raise JournalError and CapacityError, after which the journals are closed; opened again,
    they have all committed outcomes."""

    def __init__(self, folder: Path, batch_id: str) -> None:
        self._output = Journal(folder / OUTPUT, {"batch": batch_id, "holds": "output"})
        try:
            self._errors = Journal(folder / ERRORS, {"batch": batch_id, "holds": "errors"})
        except BaseException:
            self._output.close()
            raise
        self.completed, self.failed = len(self._output), len(self._errors)

    def has(self, key: str | int) -> bool:
        """Returns True if the line with this key has its outcome. May run while another thread
        writes."""
        return key in self._output or key in self._errors

    def put(self, outcomes: Sequence[LineOutcome]) -> None:
        """Writes outcomes to the disk, and then counts them. Skips lines that have an outcome
        already."""
        for outcome in outcomes:
            journal = self._output if outcome.good else self._errors
            if outcome.key not in journal:
                journal.add_json(outcome.key, outcome.text)
        for journal in (self._output, self._errors):
            journal.commit()
        self.completed, self.failed = len(self._output), len(self._errors)

    def close(self) -> None:
        try:
            self._output.close()
        finally:
            self._errors.close()


# --- moving a batch's results to the file store at its end


def adopt_output(store: FileStore, row: BatchRow) -> list[FileRow]:
    """Moves the closed journals' data files to the file store, under the ids in the batch's row.
    May be repeated after a kill. Raises OSError."""
    folder = store.batch_folder(row.id)
    named = ((row.output_file_id, OUTPUT), (row.error_file_id, ERRORS))
    return [
        _file(row, file_id, name, store.adopt(folder / name, file_id))
        for file_id, name in named
        if file_id
    ]


def error_list(errors: list[BatchError]) -> str:
    """Returns BatchErrors as JSON for the database."""
    return encoded(msgspec.to_builtins(BatchErrors(data=errors)))


def with_fault(errors: str | None, code: str, message: str) -> str:
    """Returns the JSON list of errors with an error of the whole batch added in front."""
    earlier = [] if errors is None else msgspec.convert(json.loads(errors), BatchErrors).data
    return error_list([BatchError(code=code, line=None, message=message), *earlier])


def _file(row: BatchRow, file_id: str, name: str, size: int) -> FileRow:
    return FileRow(
        id=file_id,
        owner=row.owner,
        created_at=int(time.time()),
        filename=f"{row.id}_{name}",
        purpose="batch_output",
        bytes=size,
    )
