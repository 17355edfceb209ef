"""Compresses records for the page. It writes an index of all records, and for each (model, machine,
workload shape) a group of whole records.

    data/index.js       models, machines, shapes, and the main figures of each record, as columns
    data/gN.js          the records of one group: load levels as columns, samples as 16-bit
                        logarithms; loaded on demand

Both are scripts, because a page from the file system cannot fetch. Knows no file, and computes no
headline; for a record that is dropped onto the page, 20_data.js does the same.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.almanac.figures import kept_of, most_of, sustained
from penstock.almanac.machine_spread import shown
from penstock.almanac.record import (
    BoardPower,
    ClientHealth,
    Figures,
    Interval,
    Point,
    Record,
    RecordForm,
    Sample,
)

Rows = npt.NDArray[np.float64]

PAGE_SCHEMA = 1
# Sample times are 16-bit codes on the page: 0 stands for 0 s, then come steps of 0.0425 % from a
# microsecond to a million seconds; 65,535 stands for a failed request.
SMALLEST, LARGEST, STEPS = 1e-6, 1e6, 65_000
FAILED = 65_535
# fields of a load level that are not a single value
APART = {"board", "client", "goals", "figures", "sample"}
SAMPLE = ("first", "per_token", "end_to_end")
_TABLED = ("engine", "version", "configuration")  # index columns whose texts are stored once each


@dataclass(frozen=True)
class GroupKey:
    """Model, machine and workload shape: records that agree in all three form one group. Hashable,
    and readable in the page's address."""

    model: str
    machine: str
    shape: str


def subject(record: Record) -> GroupKey:
    return GroupKey(model_label(record), machine_label(record), shape_label(record))


def model_label(record: Record) -> str:
    """Returns the model's label. Records with other weights or another number format count as
    another model."""
    model = record.model
    return f"{model.name} ({model.dtype}{', random weights' if model.weights == 'random' else ''})"


def machine_label(record: Record) -> str:
    gpu = record.machine.gpu
    if gpu is None:
        return f"{record.machine.cpu or 'CPU'}, {record.machine.cores_told}"
    return f"{gpu.count} x {gpu.name}"


def shape_label(record: Record) -> str:
    """Returns a workload shape's label, such as `128x1024`; kinds other than `exact` add their
    name."""
    shape = record.shape
    lengths = f"{shape.input:g}x{shape.output:g}"
    return lengths if shape.kind == "exact" else f"{shape.kind} {shape.name} {lengths} n={shape.n}"


# --- the script of one group of benchmark records


@dataclass(frozen=True)
class PageEntry:
    """A benchmark record's entry while the page is made. text: the compact record as JSON. line:
    its headlines."""

    about: GroupKey
    shape: list[Any]
    line: dict[str, Any]
    text: str


def entry(file: str, record: Record, rows: Sequence[Rows]) -> PageEntry:
    """Makes the entry of a record. rows: each load level's sample, as `sample_rows` makes it."""
    shape = record.shape
    lengths = [shape.kind, shape.input, shape.output, shape.n, shape.name]
    return PageEntry(
        subject(record), lengths, headlines(record), to_json(compact(record, file, rows))
    )


def group_script(number: int, entries: Iterable[PageEntry]) -> str:
    """Returns the script that defines group `number` of benchmark records."""
    return f"ALMANAC.group({number},[{','.join(each.text for each in entries)}]);\n"


def to_json(value: Any) -> str:
    """Returns ASCII JSON, so that no line separator and no name can end a script."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def compact(record: Record, file: str, rows: Sequence[Rows]) -> dict[str, Any]:
    """Returns a benchmark record as the page loads it: unchanged but for its load levels, which
    become columns."""
    small: dict[str, Any] = record.model_dump(mode="json", by_alias=True, exclude={"points"})
    small["file"] = file
    small["points"] = _columns(record.points, rows)
    return small


def _columns(points: list[Point], rows: Sequence[Rows]) -> dict[str, Any]:
    plain = [name for name in Point.model_fields if name not in APART]
    columns: dict[str, Any] = {
        name: [_short(getattr(point, name)) for point in points] for name in plain
    }
    looks, figures = (
        [dict(point.client) for point in points],
        [dict(point.figures) for point in points],
    )
    columns["client"] = {
        name: [_short(look[name]) for look in looks] for name in ClientHealth.model_fields
    }
    columns["figures"] = {
        name: [_values(told[name]) if told[name] else None for told in figures]
        for name in Figures.model_fields
    }
    columns["board"] = [
        point.board and [*map(_short, (point.board.watts, point.board.busy)), _joined(point.board)]
        for point in points
    ]
    columns["goals"] = [
        [[_short(each) for each in vars(goal).values()] for goal in point.goals] for point in points
    ]
    columns["sample"] = [packed(each) for each in rows]
    return columns


def _joined(board: BoardPower) -> list[Any] | None:
    return _values(board.joules_per_token) if board.joules_per_token else None


def _values(part: RecordForm) -> list[Any]:
    """Returns the values of a part of a benchmark record in field order: an interval's value, low
    and high, or a spread's intervals. Values are not rounded: figures were cut to six digits when
    they were derived (summaries.py's `short`).
    """
    return [_values(each) if isinstance(each, RecordForm) else each for each in vars(part).values()]


def _short(value: Any) -> Any:
    """Rounds floats to six digits, the precision of a figure; integers stay as they are."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def sample_rows(sample: Sample) -> Rows:
    """Returns [3, rows]: SAMPLE's columns. Made once a sample, for both the page and the downloads,
    because reading Python's numbers takes longer than everything done with them."""
    return np.array([getattr(sample, name) for name in SAMPLE], np.float64)


def packed(rows: Rows) -> str:
    """Returns the three columns one after the other, as 16-bit numbers, low byte first, in base64.
    Rows are sorted by their first token: their order has no meaning, and sorted rows compress
    better."""
    rows = rows[:, np.argsort(rows[0], kind="stable")]
    with np.errstate(divide="ignore"):
        steps = np.log(np.maximum(rows, 0.0) / SMALLEST) * (STEPS / np.log(LARGEST / SMALLEST))
    whole = np.where(rows < 0, FAILED, np.clip(np.rint(steps) + 1, 0, STEPS + 1))
    return base64.b64encode(whole.astype("<u2").tobytes()).decode("ascii")


# --- the script of the index of all groups


def index_script(grouped: dict[GroupKey, list[PageEntry]], facts: dict[str, Any]) -> str:
    """Returns the script of the index. grouped: the groups in the order of their numbers. facts:
    facts about the page itself (the benchmark record's JSON schema, files to download)."""
    tables = {name: _Table() for name in ("model", "machine", "shape", *_TABLED)}
    groups: list[list[Any]] = []
    rows: list[dict[str, Any]] = []
    for number, (about, entries) in enumerate(grouped.items()):
        numbers = [
            tables["model"](about.model),
            tables["machine"](about.machine),
            tables["shape"](about.shape),
        ]
        groups.append([*numbers, entries[0].shape])
        for each in entries:
            rows.append(
                {
                    "group": number,
                    **each.line,
                    **{name: tables[name](each.line[name]) for name in _TABLED},
                }
            )
    index = {
        "schema": PAGE_SCHEMA,
        **facts,
        "groups": groups,
        "tables": {name: table.values for name, table in tables.items()},
        "records": {name: [row[name] for row in rows] for name in (rows[0] if rows else [])},
    }
    return f"ALMANAC.index({to_json(index)});\n"


class _Table:
    """A table that numbers texts, so that each text is stored once."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self._numbers: dict[str, int] = {}

    def __call__(self, value: str) -> int:
        if value not in self._numbers:
            self._numbers[value] = len(self.values)
            self.values.append(value)
        return self._numbers[value]


def headlines(record: Record) -> dict[str, Any]:
    """Returns the few figures of a benchmark record that the index shows. Load levels whose client
    was short (a possible bottleneck) are left out."""
    points = [point for point in record.points if not point.client.short]
    told = [point for point in shown(record) if not point.client.short]
    ended = any(
        p.kind == "saturation" and p.complete and not p.outcomes.get("unfinished") for p in points
    )
    single, most = (
        next((point for point in told if point.kind == "single"), None),
        most_of(points),
    )
    spread = single.figures if single else None
    return {
        "engine": record.engine.name,
        "version": record.engine.version,
        "configuration": record.engine.configuration.name,
        "run": record.run,
        "when": record.when,
        "brief": 2 if record.method.edition else int(record.method.short),
        "lacks": ", ".join(record.engine.lacks),
        "wrong": int(record.answers is not None and record.answers.wrong),
        "gpus": record.machine.gpu.count if record.machine.gpu else 0,
        "parameters": record.model.parameters,
        "points": len(record.points),
        "short": sum(point.client.short for point in record.points),
        "failures": len(record.failures),
        "price": record.method.price_per_hour,
        "quantile": record.method.quantile,
        "peak": _headline(_highest(told, "request_rate"), bounded=ended),
        "tokens": _headline(_highest(told, "output_rate"), bounded=ended),
        "joules": _joules(told),
        "first": _headline(spread.first_token.p50) if spread and spread.first_token else None,
        "token": _headline(spread.per_token.p50) if spread and spread.per_token else None,
        "kept": [
            _kept(points, seconds, record.method.quantile, most) for seconds in record.method.goals
        ],
    }


def _highest(points: list[Point], name: str) -> Interval | None:
    """Returns the highest rate `name` over the load levels, judged by the low end of its 95 %
    interval. (By value, the luckiest of many windows would win.) Each kind of rate may come from
    another point: where samples share a prompt, few requests a second may be many tokens.
    """
    rates: list[Interval | None] = [getattr(point.figures, name) for point in points]
    return max(
        (rate for rate in rates if rate),
        key=lambda rate: (rate.low or 0.0, rate.value),
        default=None,
    )


def _joules(points: list[Point]) -> list[Any] | None:
    """Returns the joules of an output token where they are fewest, which is at a high load; None:
    power was not measured."""
    found = [point.board.joules_per_token for point in points if point.board]
    return _headline(min((each for each in found if each), key=lambda one: one.value, default=None))


def _headline(value: Interval | None, *, bounded: bool = True) -> list[Any] | None:
    """Returns [value, low, high] of an interval, rounded to four digits, because the index has a
    line for every record. bounded: False if the saturation load level was cut off or not measured,
    so that a highest rate has no known upper end.
    """
    if value is None:
        return None
    ends = (value.value, value.low, value.high if bounded else None)
    return [float(f"{each:.4g}") if each is not None else None for each in ends]


def _kept(points: list[Point], seconds: float, quantile: float, most: float | None) -> list[float]:
    """Returns [seconds, kept, missed] for the latency goal of `seconds`. kept: the highest measured
    request rate that meets the latency goal, at most `most`; 0: none does; -1: not measured.
    missed: the first higher rate, which misses the goal; 0: no higher rate was measured.
    """
    opened = [point for point in points if point.kind == "open" and point.rate]
    asked = [
        (sustained(point), goal)
        for point in opened
        for goal in point.goals
        if goal.seconds == seconds
    ]
    if not asked:
        return [seconds, -1, 0]
    kept = kept_of(asked, quantile, most)
    return [seconds, *(float(f"{rate or 0.0:.4g}") for rate in (kept.rate, kept.missed))]
