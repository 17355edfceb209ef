"""Raw data of a run: a line a request, as columns, written as Parquet.

Times are seconds since the beginning of the request's own point, of one monotonic clock; NaN where a request did not
get so far. It knows columns; not what is computed of them (figures.py) nor how they came about (bench).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.almanac.arrow_columns import arrow_lists, arrow_numbers, arrow_texts
from penstock.errors import RecordError, UsageError

OK = "ok"


@dataclass(slots=True)
class Samples:
    """Columns of equal length, one entry a request, in the order of the intended starts of each point's start."""

    point: npt.NDArray[np.object_]  # the point's name in its record
    start: npt.NDArray[np.int32]  # which start of the server, 0 up: points are measured again after a restart
    intended: npt.NDArray[np.float64]  # when the plan wanted it sent
    actual: npt.NDArray[np.float64]  # when it was handed to the socket: stamped before the write
    first: npt.NDArray[np.float64]  # when the first event with output arrived; NaN: never, or not streamed
    end: npt.NDArray[np.float64]  # when the answer was complete, or had failed
    events: npt.NDArray[np.int32]  # events with output
    gaps: npt.NDArray[np.object_]  # seconds between neighbouring events with output: a float32 array a request
    prompt_tokens: npt.NDArray[np.int32]  # by the server's usage; -1: it told none
    output_tokens: npt.NDArray[np.int32]
    cached_tokens: npt.NDArray[np.int32]
    asked_prompt: npt.NDArray[np.int32]  # what the workload asked for; -1: of no fixed length
    asked_output: npt.NDArray[np.int32]
    window: npt.NDArray[np.bool_]  # issued within the steady-state window: only these are counted
    outcome: npt.NDArray[np.object_]  # "ok", or what failed in a word of OUTCOMES

    def __len__(self) -> int:
        return len(self.point)

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, each.name)) for each in fields(self)}
        if len(lengths) != 1:
            raise RecordError(f"columns of samples differ in length: {sorted(lengths)}")

    def of(self, keep: npt.NDArray[Any]) -> Samples:
        """Returns the requests that `keep` (a mask or indices) names."""
        return Samples(**{each.name: getattr(self, each.name)[keep] for each in fields(self)})


# What became of a request. "ok" is complete, streamed to its end, with the asked number of tokens.
OUTCOMES = (
    OK,
    "refused",  # no connection
    "status",  # an HTTP status that is not 200
    "stalled",  # nothing came within the time limit
    "cut",  # the connection ended before the stream did
    "broken",  # bytes that are no HTTP, no server-sent event or no JSON
    "usage",  # no usage, or usage that contradicts the events
    "length",  # another number of tokens than asked for, in or out
    "unfinished",  # the point ended first
)
_KINDS: dict[str, Any] = {
    "point": object, "start": np.int32, "events": np.int32, "prompt_tokens": np.int32, "output_tokens": np.int32,
    "cached_tokens": np.int32, "asked_prompt": np.int32, "asked_output": np.int32, "window": np.bool_,
    "outcome": object, "gaps": object,
}  # fmt: skip


def from_lists(columns: dict[str, list[Any]]) -> Samples:
    """Columns from plain lists (`gaps`: a sequence of seconds a request). Raises RecordError for a missing column or an
    outcome that is none."""
    names = [each.name for each in fields(Samples)]
    missing = [name for name in names if name not in columns]
    if missing:
        raise RecordError(f"samples lack the columns {', '.join(missing)}")
    unknown = set(columns["outcome"]) - set(OUTCOMES)
    if unknown:
        raise RecordError(f"samples have outcomes that are none: {', '.join(sorted(map(repr, unknown)))[:200]}")
    arrays = {name: np.array(columns[name], _KINDS.get(name, np.float64)) for name in names if name != "gaps"}
    gaps = np.empty(len(columns["gaps"]), object)
    for at, of_one in enumerate(columns["gaps"]):
        gaps[at] = np.asarray(of_one, np.float32)
    return Samples(**arrays, gaps=gaps)


def join(parts: list[Samples]) -> Samples:
    names = [each.name for each in fields(Samples)]
    return Samples(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def write_parquet(samples: Samples, path: Path) -> None:
    """Writes aside and renames, so that a file of this name is whole. Raises UsageError where pyarrow is missing."""
    needs_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({each.name: _arrow(each.name, getattr(samples, each.name)) for each in fields(samples)})
    aside = path.with_name(path.name + ".part")
    pq.write_table(table, aside, compression="zstd")
    aside.replace(path)


def _arrow(name: str, column: npt.NDArray[Any]) -> Any:
    if name == "gaps":
        return arrow_lists(column)
    return arrow_texts(column) if column.dtype == object else arrow_numbers(column)


def read_parquet(path: Path) -> Samples:
    """Raises RecordError for a file that is no table of samples, UsageError where pyarrow is missing."""
    needs_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path).read()  # read_table imports pandas
    except (OSError, pa.ArrowException) as error:
        why = str(error).split(str(path))[-1].strip("': .")[:200]
        raise RecordError(f"{path.name}: is no Parquet file of samples: {why}") from error
    try:
        return from_lists({name: table.column(name).to_pylist() for name in table.column_names})
    except (TypeError, ValueError, OverflowError) as error:  # a column of another type than its own
        raise RecordError(f"{path.name}: is no table of samples: {str(error)[:200]!r}") from error


def needs_pyarrow() -> None:
    """Raises UsageError where it is missing."""
    if find_spec("pyarrow") is None:
        raise UsageError('Parquet files need a package that isn\'t here: pip install "penstock[parquet]"')
