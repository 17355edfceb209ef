"""What can be taken away from the page: every record as JSON, every point as CSV and as Parquet.

The JSON is the records' own text. A row of the CSV is a point with what was measured and its figures; the Parquet file
has the same rows with the samples beside them. It knows records and files; not the page."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from penstock.almanac.page.compact import QUANTILES, RATES, SPREADS
from penstock.almanac.record import Interval, Point, Record
from penstock.errors import UsageError

NAMES = ("records.json", "points.csv", "points.parquet")
_SAMPLE = ("first", "per_token", "end_to_end")


def write_json(texts: Iterable[str], path: Path) -> None:
    """All records as one JSON array, a record a line."""
    with path.open("w", encoding="utf-8") as out:
        out.write("[")
        for number, text in enumerate(texts):
            out.write(("," if number else "") + "\n" + text)
        out.write("\n]\n")


def write_tables(records: list[tuple[str, Record]], folder: Path) -> None:
    """points.csv and points.parquet. Raises UsageError where pyarrow is missing."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UsageError("the almanac's page needs pyarrow for its Parquet file: pip install pyarrow") from error
    rows = [row for file, record in records for row in _rows(file, record)]
    names = list(_row("", None, None))
    with (folder / "points.csv").open("w", encoding="utf-8", newline="") as out:
        table = csv.writer(out)
        table.writerow(names)
        table.writerows([_inert(row[name]) for name in names] for row in rows)
    columns = {name: pa.array([row[name] for row in rows], _arrow(name, pa)) for name in names}
    for name in _SAMPLE:
        samples = (getattr(point.sample, name) for _, record in records for point in record.points)
        columns[f"sample_{name}"] = pa.array(list(samples), pa.list_(pa.float32()))
    pq.write_table(pa.table(columns), folder / "points.parquet", compression="zstd")


def _inert(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula is quoted, as spreadsheets do it."""
    return "'" + value if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value


def _rows(file: str, record: Record) -> Iterator[dict[str, Any]]:
    for point in record.points:
        yield _row(file, record, point)


_TEXTS = (
    "file", "run", "when", "engine", "version", "commit", "configuration", "model", "dtype", "weights", "gpu", "cpu",
    "shape", "shape_kind", "point", "kind", "marks", "raw_sha256",
)  # fmt: skip
_NUMBERS = (
    "gpus", "input", "output", "n", "rate", "concurrency", "seconds", "requests", "complete", "output_tokens",
    "prompt_tokens", "cached_tokens", "client_short", "client_lag_p99", "client_headroom",
)  # fmt: skip


def _row(file: str, record: Record | None, point: Point | None) -> dict[str, Any]:
    """A point's row; without a record: its names alone."""
    row: dict[str, Any] = dict.fromkeys((*_TEXTS, *_NUMBERS))
    if record is not None and point is not None:
        row.update(_what(record), file=file)
        row.update(
            point=point.name, kind=point.kind, rate=point.rate, concurrency=point.concurrency, seconds=point.seconds,
            requests=point.requests, complete=point.complete, output_tokens=point.output_tokens,
            prompt_tokens=point.prompt_tokens, cached_tokens=point.cached_tokens, marks="; ".join(point.marks),
            client_short=int(point.client.short), client_lag_p99=point.client.lag_p99,
            client_headroom=point.client.headroom,
        )  # fmt: skip
    figures = point.figures if point else None
    for name in RATES:
        row.update(_interval(name, getattr(figures, name, None)))
    for name in SPREADS:
        spread = getattr(figures, name, None)
        for quantile in QUANTILES:
            row.update(_interval(f"{name}_{quantile}", getattr(spread, quantile, None)))
    return row


def _what(record: Record) -> dict[str, Any]:
    gpu, shape = record.machine.gpu, record.shape
    return dict(
        run=record.run, when=record.when, engine=record.engine.name, version=record.engine.version,
        commit=record.engine.commit, configuration=record.engine.configuration.name, model=record.model.name,
        dtype=record.model.dtype, weights=record.model.weights, gpu=gpu.name if gpu else None,
        gpus=gpu.count if gpu else 0, cpu=record.machine.cpu, shape=shape.name, shape_kind=shape.kind,
        input=shape.input, output=shape.output, n=shape.n, raw_sha256=record.raw.sha256 if record.raw else None,
    )  # fmt: skip


def _interval(name: str, value: Interval | None) -> dict[str, float | None]:
    if value is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}


def _arrow(name: str, pa: Any) -> Any:
    return pa.string() if name in _TEXTS else pa.float64()
