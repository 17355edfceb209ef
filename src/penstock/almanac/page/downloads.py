"""What can be taken away from the page: every record as JSON, every point and failure as CSV and as Parquet.

Records are given one after the other and not kept: 2,000 of them are a gigabyte of Python's numbers. It knows records
and files; not the page.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.almanac.arrow_columns import arrow_lists, arrow_numbers, arrow_texts
from penstock.almanac.page.compact import QUANTILES, RATES, SAMPLE, SPREADS, Rows
from penstock.almanac.record import Interval, Point, PointFailure, Record
from penstock.almanac.samples import OUTCOMES, needs_pyarrow

NAMES = ("records.json", "points.csv", "points.parquet")
TEXTS = (
    "file", "run", "when", "engine", "version", "commit", "configuration", "model", "dtype", "weights", "gpu", "cpu",
    "shape", "shape_kind", "prompts", "raw_sha256", "point", "kind", "marks", "failure", "message",
)  # the last five of the point or the failure  # fmt: skip
_OF_RECORD = ("gpus", "input", "output", "n", "price_per_hour", "brief")
_OF_POINT = (
    "rate", "concurrency", "seconds", "opens", "requests", "effective", "complete", "output_tokens", "prompt_tokens",
    "cached_tokens",
)  # fmt: skip
_OF_CLIENT = ("lag_p99", "busy", "headroom", "late_p99", "short")
_INTERVALS = (*RATES, *(f"{name}_{quantile}" for name in SPREADS for quantile in QUANTILES))
_FAILED = OUTCOMES[1:]
NUMBERS = (
    *_OF_RECORD, *_OF_POINT, *(f"outcome_{name}" for name in _FAILED), *(f"client_{name}" for name in _OF_CLIENT),
    *(f"{name}{end}" for name in _INTERVALS for end in ("", "_low", "_high")),
)  # fmt: skip
GOAL = ("seconds", "share", "low", "high", "goodput")  # of goal1, goal2, ...: as many as the point with most has
NAN = float("nan")


class Downloads:
    """Writes the three files as records come. Raises UsageError where pyarrow is missing."""

    def __init__(self, folder: Path) -> None:
        needs_pyarrow()
        import pyarrow.parquet

        self._parquet: Any = pyarrow.parquet
        self._folder = folder
        self._texts: list[list[str | None]] = []  # [rows] of TEXTS
        self._numbers: list[list[float]] = []  # [rows] of NUMBERS; NaN: there is none
        self._goals: list[list[float]] = []  # [rows] of GOAL, one goal after the other
        self._samples: dict[str, list[npt.NDArray[np.float32]]] = {name: [] for name in SAMPLE}
        self._json = (folder / "records.json").open("w", encoding="utf-8")
        self._count = 0

    def add(self, file: str, record: Record, text: str, rows: Sequence[Rows]) -> None:
        """Adds a record's rows. `text`: the record as it came; `rows`: of its points' samples, as compact.py's
        `sample_rows` makes them."""
        self._json.write((",\n" if self._count else "[\n") + text.strip().replace("\n", " "))
        self._count += 1
        texts, numbers = _what(file, record)
        for point, sample in zip(record.points, rows, strict=True):
            self._texts.append([*texts, point.name, point.kind, "; ".join(point.marks), None, None])
            self._numbers.append([*numbers, *_point_numbers(point)])
            self._goals.append([getattr(goal, name) for goal in point.goals for name in GOAL])
            for name, column in zip(SAMPLE, sample.astype(np.float32), strict=True):
                self._samples[name].append(column)
        for failure in record.failures:
            self._fail(failure, texts, numbers)

    def _fail(self, failure: PointFailure, texts: list[str | None], numbers: list[float]) -> None:
        """Adds a row that measured nothing. The log's tail is in the JSON alone."""
        self._texts.append([*texts, failure.point, None, None, failure.kind, failure.message])
        self._numbers.append([*numbers, *[NAN] * (len(NUMBERS) - len(numbers))])
        self._goals.append([])
        for name in SAMPLE:
            self._samples[name].append(np.empty(0, np.float32))

    def close(self) -> None:
        """Ends the JSON, writes the tables."""
        self._json.write("\n]\n" if self._count else "[]\n")
        self._json.close()
        most = max(map(len, self._goals), default=0)
        named = [*NUMBERS, *(f"goal{1 + at // len(GOAL)}_{GOAL[at % len(GOAL)]}" for at in range(most))]
        for numbers, goals in zip(self._numbers, self._goals, strict=True):
            numbers += goals + [NAN] * (most - len(goals))
        with (self._folder / "points.csv").open("w", encoding="utf-8", newline="") as out:
            table = csv.writer(out)
            table.writerow([*TEXTS, *named])
            for texts, numbers in zip(self._texts, self._numbers, strict=True):
                table.writerow([*map(_inert, texts), *("" if value != value else f"{value:.10g}" for value in numbers)])
        self._write_parquet(named)

    def _write_parquet(self, named: list[str]) -> None:
        import pyarrow as pa

        matrix = np.array(self._numbers, np.float64).reshape(-1, len(named))
        columns = {name: arrow_texts([row[at] for row in self._texts]) for at, name in enumerate(TEXTS)}
        columns |= {name: arrow_numbers(matrix[:, at], ~np.isnan(matrix[:, at])) for at, name in enumerate(named)}
        columns |= {f"sample_{name}": arrow_lists(samples) for name, samples in self._samples.items()}
        path = self._folder / "points.parquet"
        # Numbers hardly repeat: to look for those that do took more time than all else here.
        self._parquet.write_table(
            pa.table(columns), path, compression="zstd", compression_level=1, use_dictionary=[*TEXTS]
        )


def _inert(value: str | None) -> str | None:
    """Quotes a text that a spreadsheet would take for a formula, as spreadsheets do it."""
    return "'" + value if value and value[0] in "=+-@\t" else value


def _what(file: str, record: Record) -> tuple[list[str | None], list[float]]:
    """Returns what all rows of a record share: TEXTS but for the last five, and the first of NUMBERS."""
    gpu, shape, engine, model = record.machine.gpu, record.shape, record.engine, record.model
    texts = [
        file, record.run, record.when, engine.name, engine.version, engine.commit, engine.configuration.name,
        model.name, model.dtype, model.weights, gpu.name if gpu else None, record.machine.cpu, shape.name, shape.kind,
        shape.prompts, record.raw.sha256 if record.raw else None,
    ]  # fmt: skip
    price = record.method.price_per_hour
    numbers = [gpu.count if gpu else 0, shape.input, shape.output, shape.n, NAN if price is None else price]
    return texts, [*numbers, record.method.short]


def _point_numbers(point: Point) -> list[float]:
    values: list[float | None] = [getattr(point, name) for name in _OF_POINT]
    values += [point.outcomes.get(name, 0) for name in _FAILED]
    values += [getattr(point.client, name) for name in _OF_CLIENT]
    for name in RATES:
        values += _three(getattr(point.figures, name))
    for name in SPREADS:
        spread = getattr(point.figures, name)
        for quantile in QUANTILES:
            values += _three(getattr(spread, quantile) if spread else None)
    return [NAN if value is None else value for value in values]


def _three(value: Interval | None) -> list[float | None]:
    return [None, None, None] if value is None else [value.value, value.low, value.high]
