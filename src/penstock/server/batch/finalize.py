"""The end of a batch: what it has written becomes files of its owner, and what ended it is said in its errors.

It knows a batch's folder and row, and the file store; what follows is the batch job's. `adopt_output` and
`lend_output` block: they are called in a thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from penstock.server.batch.database import BatchRow, FileRow, encoded
from penstock.server.batch.file_store import FileStore
from penstock.server.batch.output_files import ERRORS, OUTPUT, BatchOutput

FEW = 10  # errors of one batch that a list of batches tells
_OPENING = '{"object":"list","data":['  # what `error_list` begins with


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


def few_of(head: str, batch_id: str) -> str:
    """Parses the beginning of a list of errors and returns the first FEW; then, where there are more, where all are."""
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
    return error_list(found)


def _file(row: BatchRow, file_id: str, name: str, size: int) -> FileRow:
    return FileRow(
        id=file_id, owner=row.owner, created_at=int(time.time()), filename=f"{row.id}_{name}", purpose="batch_output",
        bytes=size,
    )  # fmt: skip
