"""Writes the page's download files. They hold every record as JSON, and every load level and
failure as CSV and as Parquet.

Records are added one after the other and not kept: 2,000 records take a gigabyte as Python numbers.
Knows records and files; not the page.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.almanac.arrow_columns import arrow_lists, arrow_numbers, arrow_texts
from penstock.almanac.machine_spread import shown
from penstock.almanac.page.compact import SAMPLE, Rows
from penstock.almanac.record import Point, Record, Spread
from penstock.almanac.samples import OUTCOMES, needs_pyarrow

NAMES = ("records.json", "points.csv", "points.parquet")
# columns of points.csv that hold text; all others hold numbers
TEXTS = (
    "file",
    "run",
    "when",
    "engine",
    "version",
    "commit",
    "configuration",
    "lacks",
    "model",
    "dtype",
    "weights",
    "gpu",
    "cpu",
    "shape",
    "shape_kind",
    "prompts",
    "raw_sha256",
    "point",
    "kind",
    "marks",
    "failure",
    "message",
)
_OF_POINT = (
    "rate",
    "concurrency",
    "seconds",
    "opens",
    "requests",
    "effective",
    "complete",
    "output_tokens",
    "prompt_tokens",
    "cached_tokens",
    "accepted_drafts",
)
Row = dict[str, Any]


class Downloads:
    """Writes the three files as records are added. Raises UsageError when pyarrow is missing."""

    def __init__(self, folder: Path) -> None:
        needs_pyarrow()
        self._folder = folder
        # column name -> its values; None is a missing value
        self._columns: dict[str, list[Any]] = {name: [] for name in TEXTS}
        self._samples: dict[str, list[npt.NDArray[np.float32]]] = {name: [] for name in SAMPLE}
        self._json = (folder / "records.json").open("w", encoding="utf-8")
        self._before = "[\n"

    def add(self, file: str, record: Record, text: str, rows: Sequence[Rows]) -> None:
        """Adds a benchmark record's rows. text: the record's JSON. rows: each load level's sample,
        as compact.py's `sample_rows` makes it."""
        self._json.write(self._before + text.strip().replace("\n", " "))
        self._before = ",\n"
        shared = _shared(file, record)
        for point, sample in zip(shown(record), rows, strict=True):
            self._add(shared | _of_point(point), sample)
        for failure in record.failures:  # only the JSON file has the end of the log
            measured = {"point": failure.point, "failure": failure.kind, "message": failure.message}
            self._add(shared | measured, np.empty((len(SAMPLE), 0)))

    def _add(self, row: Row, sample: Rows) -> None:
        for name in row:
            if name not in self._columns:
                self._columns[name] = [None] * len(self._columns["file"])
        for name, column in self._columns.items():
            column.append(row.get(name))
        for name, times in zip(SAMPLE, sample.astype(np.float32), strict=True):
            self._samples[name].append(times)

    def close(self) -> None:
        """Ends the JSON file and writes the CSV and Parquet tables."""
        self._json.write("\n]\n" if self._before == ",\n" else "[]\n")
        self._json.close()
        with (self._folder / "points.csv").open("w", encoding="utf-8", newline="") as out:
            table = csv.writer(out)
            table.writerow(self._columns)
            table.writerows(map(_shown, row) for row in zip(*self._columns.values(), strict=True))
        self._write_parquet()

    def _write_parquet(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = {}
        for name, column in self._columns.items():
            numbers = np.array([] if name in TEXTS else column, np.float64)
            columns[name] = (
                arrow_texts(column) if name in TEXTS else arrow_numbers(numbers, ~np.isnan(numbers))
            )
        columns |= {
            f"sample_{name}": arrow_lists(samples) for name, samples in self._samples.items()
        }
        path = self._folder / "points.parquet"
        # Numbers hardly repeat, and building a dictionary took longer than everything else here.
        pq.write_table(
            pa.table(columns),
            path,
            compression="zstd",
            compression_level=1,
            use_dictionary=[*TEXTS],
        )


def _shown(value: Any) -> str:
    """Returns a value's text. A text that a spreadsheet would read as a formula gets a leading
    quote."""
    if isinstance(value, str):
        return "'" + value if value and value[0] in "=+-@\t" else value
    return "" if value is None else f"{value:.10g}"


def _shared(file: str, record: Record) -> Row:
    """Returns the columns that all rows of a benchmark record share."""
    gpu, shape, engine, model = record.machine.gpu, record.shape, record.engine, record.model
    return {
        "file": file,
        "run": record.run,
        "when": record.when,
        "engine": engine.name,
        "version": engine.version,
        "commit": engine.commit,
        "configuration": engine.configuration.name,
        "lacks": "; ".join(engine.lacks),
        "model": model.name,
        "dtype": model.dtype,
        "weights": model.weights,
        "gpu": gpu.name if gpu else None,
        "cpu": record.machine.cpu,
        "shape": shape.name,
        "shape_kind": shape.kind,
        "prompts": shape.prompts,
        "raw_sha256": record.raw.sha256 if record.raw else None,
        "gpus": gpu.count if gpu else 0,
        "input": shape.input,
        "output": shape.output,
        "n": shape.n,
        "price_per_hour": record.method.price_per_hour,
        "brief": record.method.short,
        "edition": record.method.edition is not None,
        "answers_kl": record.answers and record.answers.kl,
        "answers_wrong": record.answers and record.answers.wrong,
    }


def _of_point(point: Point) -> Row:
    row: Row = {"point": point.name, "kind": point.kind, "marks": "; ".join(point.marks)}
    row |= {name: getattr(point, name) for name in _OF_POINT}
    row |= {f"outcome_{name}": point.outcomes.get(name, 0) for name in OUTCOMES[1:]}
    joules = point.board and point.board.joules_per_token
    row |= {
        "board_watts": point.board and point.board.watts,
        "gpu_busy": point.board and point.board.busy,
        "joules_per_token": joules and joules.value,
    }
    row |= {f"client_{name}": value for name, value in point.client}
    for name, figure in point.figures:
        spread = (
            {f"{name}_{quantile}": each for quantile, each in figure}
            if isinstance(figure, Spread)
            else {}
        )
        for key, interval in spread.items() or ([(name, figure)] if figure is not None else []):
            row[key], row[f"{key}_low"], row[f"{key}_high"] = (
                interval.value,
                interval.low,
                interval.high,
            )
    for number, goal in enumerate(point.goals, 1):
        row |= {f"goal{number}_{name}": value for name, value in goal}
    return row
