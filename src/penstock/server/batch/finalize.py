"""The end of a batch: what it has written becomes files of its owner, and what ended it is said in its errors.

It knows a batch's folder and row, and the shelf; how often it is tried, and what follows, is batch_job's. `adopted` and
`lent` block: they are called in a thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from penstock.server.batch.database import BatchRow, FileRow, encoded
from penstock.server.batch.file_store import FileStore
from penstock.server.batch.output_files import ERRORS, OUTPUT, BatchOutput

NO_FILES: dict[str, Any] = {"output_file_id": None, "error_file_id": None}
FEW = 10  # errors of one batch that a list of batches tells
_OPENING = '{"object":"list","data":['  # of what `listed` gives


def adopted(shelf: FileStore, row: BatchRow) -> list[FileRow]:
    """The files of closed results, under the ids that they have got; again, where a kill came between. Raises
    OSError."""
    folder = shelf.batch_folder(row.id)
    named = ((row.output_file_id, OUTPUT), (row.error_file_id, ERRORS))
    return [_file(row, file_id, name, shelf.adopt(folder / name, file_id)) for file_id, name in named if file_id]


def lent(shelf: FileStore, row: BatchRow, ids: tuple[str, str]) -> tuple[list[FileRow], dict[str, Any]]:
    """Files, under these ids, of what is done of a batch that fails by a fault of ours, and the columns of its row that
    say so; again, where the disk failed before. What it wrote stays in its folder too, for whoever looks into it.
    Raises OSError, PenstockError."""
    folder = shelf.batch_folder(row.id)
    results = BatchOutput(folder, row.id)
    results.close()
    files, columns = [], {**NO_FILES, "completed": results.completed, "failed": results.failed}
    named = (("output_file_id", OUTPUT, results.completed), ("error_file_id", ERRORS, results.failed))
    for (column, name, count), file_id in zip(named, ids, strict=True):
        if count:
            columns[column] = file_id
            files.append(_file(row, file_id, name, shelf.lend(folder / name, file_id)))
    return files, columns


def listed(errors: Sequence[dict[str, Any]]) -> str:
    """OpenAI's list of a batch's errors, for its column."""
    return encoded({"object": "list", "data": errors})


def with_fault(errors: str | None, code: str, message: str) -> str:
    """As listed: one error of the whole batch before those of its lines."""
    earlier = [] if errors is None else json.loads(errors)["data"]
    return listed([{"code": code, "line": None, "message": message, "param": None}, *earlier])


def few_of(head: str, batch_id: str) -> str:
    """Of a list of errors, whose beginning this is, the first; then, where it has more, where all are told."""
    found: list[Any] = []
    at = len(_OPENING) - 1  # the sign before the next one
    while len(found) < FEW and head[at : at + 1] != "]":
        try:
            error, at = json.JSONDecoder().raw_decode(head, at + 1)
        except ValueError:  # here the beginning ends
            break
        found.append(error)
    if head[at : at + 1] != "]":
        message = f"a list of batches tells the first errors of each: GET /v1/batches/{batch_id} has them all"
        found.append({"code": "more_errors", "line": None, "message": message, "param": None})
    return listed(found)


def _file(row: BatchRow, file_id: str, name: str, size: int) -> FileRow:
    return FileRow(
        id=file_id, owner=row.owner, created_at=int(time.time()), filename=f"{row.id}_{name}", purpose="batch_output",
        bytes=size,
    )  # fmt: skip
