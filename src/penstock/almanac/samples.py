"""Raw data of a run: one row per request. It is kept in columns and stored as Parquet. A run has
several points (load levels), each measured on one or more starts of the server.

Times are seconds since the request's own load level began, on one monotonic clock; NaN where a
request did not get so far. Knows columns; not what is derived from them (figures.py) nor how they
were measured (bench).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.almanac.arrow_columns import (
    arrow_lists,
    arrow_numbers,
    arrow_texts,
    lists_of,
    numbers_of,
    texts_of,
)
from penstock.disk import open_plain
from penstock.errors import RecordError, UsageError

OK = "ok"
# A raw file's columns may take USUAL_BYTES in memory plus EXPANSION times the file's size. Times of
# measured requests differ, so they take a tenth of that.
USUAL_BYTES, EXPANSION = 64 << 20, 32
ROW_BYTES = 256  # bytes a row beside its numbers: array heads, references to texts


@dataclass(slots=True)
class Samples:
    """Columns of equal length, one entry per request. Requests of one load level and server start
    are in the order of their intended send times."""

    point: npt.NDArray[np.object_]  # the load level's name in its record
    # number of the server start, from 0; load levels are measured again after a restart
    start: npt.NDArray[np.int32]
    intended: npt.NDArray[np.float64]  # instant at which the plan wanted the request sent
    actual: npt.NDArray[np.float64]  # instant just before it was written to the socket
    # arrival of the first event with output; NaN: never, or not streamed
    first: npt.NDArray[np.float64]
    end: npt.NDArray[np.float64]  # instant at which the answer was complete, or had failed
    events: npt.NDArray[np.int32]  # number of streamed events with output
    # seconds between neighbouring events with output: a float32 array a request
    gaps: npt.NDArray[np.object_]
    prompt_tokens: npt.NDArray[np.int32]  # number that the server's usage reports; -1: not given
    output_tokens: npt.NDArray[np.int32]
    cached_tokens: npt.NDArray[np.int32]
    # prompt tokens that the workload asks for; -1: no fixed length
    asked_prompt: npt.NDArray[np.int32]
    asked_output: npt.NDArray[np.int32]
    # True if sent within the steady-state window: figures count only these requests
    window: npt.NDArray[np.bool_]
    outcome: npt.NDArray[np.object_]  # "ok", or the kind of failure, one of OUTCOMES

    def __len__(self) -> int:
        return len(self.point)

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, each.name)) for each in fields(self)}
        if len(lengths) != 1:
            raise RecordError(f"columns of samples differ in length: {sorted(lengths)}")

    def of(self, keep: npt.NDArray[Any]) -> Samples:
        """Returns the requests that `keep` (a mask or indices) selects."""
        return Samples(**{each.name: getattr(self, each.name)[keep] for each in fields(self)})


# Outcomes of a request. "ok" is complete: streamed to its end, with the requested number of tokens.
OUTCOMES = (
    OK,
    "refused",  # the connection was refused
    "status",  # an HTTP status other than 200
    "stalled",  # nothing arrived within the time limit
    "cut",  # the connection ended before the stream did
    "broken",  # bytes that are no HTTP, no server-sent event or no JSON
    "usage",  # no usage, or usage that contradicts the events
    "length",  # the prompt or the answer has another number of tokens than requested
    "unfinished",  # still running when the load level ended
)
_KINDS: dict[str, Any] = {
    "point": object,
    "start": np.int32,
    "events": np.int32,
    "prompt_tokens": np.int32,
    "output_tokens": np.int32,
    "cached_tokens": np.int32,
    "asked_prompt": np.int32,
    "asked_output": np.int32,
    "window": np.bool_,
    "outcome": object,
    "gaps": object,
}


def from_lists(columns: dict[str, list[Any]]) -> Samples:
    """Builds columns from plain lists (`gaps`: a sequence of seconds a request). Raises RecordError
    for a missing column or an unknown outcome."""
    names = [each.name for each in fields(Samples)]
    missing = [name for name in names if name not in columns]
    if missing:
        raise RecordError(f"samples lack the columns {', '.join(missing)}")
    _check_outcomes(columns["outcome"])
    arrays = {
        name: np.array(columns[name], _KINDS.get(name, np.float64))
        for name in names
        if name != "gaps"
    }
    gaps = np.empty(len(columns["gaps"]), object)
    for at, of_one in enumerate(columns["gaps"]):
        gaps[at] = np.asarray(of_one, np.float32)
    return Samples(**arrays, gaps=gaps)


def _check_outcomes(outcomes: Iterable[Any]) -> None:
    if unknown := set(outcomes) - set(OUTCOMES):
        raise RecordError(
            f"samples have outcomes that are none: {', '.join(sorted(map(repr, unknown)))[:200]}"
        )


def join(parts: list[Samples]) -> Samples:
    names = [each.name for each in fields(Samples)]
    return Samples(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    )


def write_parquet(samples: Samples, path: Path, metadata: dict[bytes, bytes] | None = None) -> None:
    """Writes the samples as Parquet: to a temporary file that is renamed, so that `path` is never
    incomplete. metadata: more for the file's head. Raises UsageError when pyarrow is missing."""
    needs_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {each.name: _arrow(each.name, getattr(samples, each.name)) for each in fields(samples)}
    )
    if metadata:
        table = table.replace_schema_metadata(metadata)
    aside = path.with_name(path.name + ".part")
    pq.write_table(table, aside, compression="zstd")
    aside.replace(path)


def _arrow(name: str, column: npt.NDArray[Any]) -> Any:
    if name == "gaps":
        return arrow_lists(column)
    return arrow_texts(column) if column.dtype == object else arrow_numbers(column)


def read_parquet(path: Path) -> Samples:
    """Reads samples from Parquet. Raises RecordError for any other file, and for one that takes far
    more memory than it has bytes (repeated values are stored once); UsageError when pyarrow is
    missing."""
    needs_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_plain(path) as file:
            told = pq.ParquetFile(file).metadata
            _check_size(told, os.fstat(file.fileno()).st_size)
            texts = {told.schema.column(number).path for number in range(told.num_columns)} & {
                "point",
                "outcome",
            }
            # Texts stay dictionary-encoded. read_table would import pandas.
            parquet = pq.ParquetFile(file, metadata=told, read_dictionary=sorted(texts))
            table = parquet.read([each.name for each in fields(Samples)])
    except (OSError, pa.ArrowException, MemoryError) as error:
        why = str(error).split(str(path))[-1].strip("': .")[:200]
        raise RecordError(f"{path.name}: is no Parquet file of samples: {why}") from error
    except RecordError as error:
        raise RecordError(f"{path.name}: {error}") from error
    missing = [each.name for each in fields(Samples) if each.name not in table.column_names]
    if missing:
        raise RecordError(f"samples lack the columns {', '.join(missing)}")
    try:
        arrays = {
            each.name: _column(each.name, table.column(each.name)) for each in fields(Samples)
        }
    except (TypeError, ValueError, OverflowError) as error:
        # the table has a column of another type than expected
        raise RecordError(f"{path.name}: is no table of samples: {str(error)[:200]!r}") from error
    _check_outcomes(arrays["outcome"])
    return Samples(**arrays)


def _check_size(told: Any, size: int) -> None:
    """Raises RecordError for a file of `size` bytes whose columns would take far more memory than
    that. told: the file's Parquet metadata."""
    names = {each.name for each in fields(Samples)}
    groups = (told.row_group(number) for number in range(told.num_row_groups))
    leaves = (group.column(number) for group in groups for number in range(told.num_columns))
    ours = [leaf for leaf in leaves if leaf.path_in_schema.partition(".")[0] in names]
    needed = ROW_BYTES * told.num_rows + sum(
        max(8 * leaf.num_values, leaf.total_uncompressed_size) for leaf in ours
    )
    if needed > (most := USUAL_BYTES + EXPANSION * size):
        raise RecordError(
            f"its {told.num_rows} rows take {needed >> 20} MiB of memory, and a file of {size}"
            f" bytes may take {most >> 20}: no requests that were measured repeat so"
        )


def _column(name: str, column: Any) -> npt.NDArray[Any]:
    """Converts an Arrow column to a numpy column. Raises ValueError, TypeError or OverflowError for
    a column of another type."""
    if name == "gaps":
        return lists_of(column)
    kind = _KINDS.get(name, np.float64)
    return texts_of(column) if kind is object else numbers_of(column, np.dtype(kind))


def needs_pyarrow() -> None:
    """Raises UsageError when pyarrow is missing."""
    if find_spec("pyarrow") is None:
        raise UsageError(
            'Parquet files need a package that isn\'t here: pip install "penstock[parquet]"'
        )
