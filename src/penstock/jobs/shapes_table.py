"""The tables of `penstock bench shapes`, and its line of JSON. It knows rows of figures alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from penstock.jobs.shapes_parts import PARTS
from penstock.jobs.shapes_works import WAYS, Family, Target, Work

Row = dict[str, Any]
# (title, width, key, format)
COLUMNS = (
    ("out tok/s", 11, "output_tokens_per_second", ",.0f"),
    ("all tok/s", 11, "total_tokens_per_second", ",.0f"),
    ("req/s", 8, "requests_per_second", ",.1f"),
    ("steps/s", 9, "steps_per_second", ",.1f"),
    ("busy %", 8, "busy_percent", ".1f"),
    ("limit %", 9, "limit_percent", ".1f"),
    ("host ms", 9, "host_ms", ".2f"),
    ("thrown %", 10, "thrown_away_percent", ".2f"),
    ("peak MiB", 10, "peak_memory_mib", ",.0f"),
    ("s", 7, "seconds", ".1f"),
)
LESS_IS_MORE = ("percent_lost", "thrown_away_percent", "warm_seconds")
NAME = 20
TOP_KERNELS = 6


def print_tables(known: Family, data: dict[str, Any], show: Callable[[str], None]) -> None:
    """Figures of every work, its targets (for the real shape on a GPU), the parts of a step, and all of it as JSON."""
    rows = [(work, way, row) for work in known.works for way in WAYS if (row := _row(known, data, work, way))]
    if not rows:
        show("nothing was measured")
        return
    show("")
    show(f"{'work':{NAME}}{'way':6}" + "".join(f"{title:>{width}}" for title, width, _, _ in COLUMNS))
    for work, way, row in rows:
        cells = "".join(f"{_number(row.get(key), form):>{width}}" for _, width, key, form in COLUMNS)
        show(f"{work.name:{NAME}}{way:6}{cells}{' cut' if row.get('cut') else ''}")
    if known.shape.name == "llama-3.2-1b":
        _print_targets(rows, show)
    _print_parts(rows, show)
    show("")
    show(json.dumps(summary(known, data), separators=(",", ":")))


def summary(known: Family, data: dict[str, Any]) -> dict[str, Any]:
    """One object: the machine, and every work's figures without its list of kernels."""
    works = {
        key: {name: _short(value) for name, value in row.items() if name != "kernels"}
        for key, row in data["works"].items()
        if key.startswith(f"{known.shape.name}/")
    }
    place = {name: value for name, value in data["machine"].items() if name != "engine"}
    return {"shape": known.shape.name, "machine": place, "works": works}


def _row(known: Family, data: dict[str, Any], work: Work, way: str) -> Row | None:
    row: Row | None = data["works"].get(f"{known.shape.name}/{work.name}/{way}")
    return row


def _print_targets(rows: list[tuple[Work, str, Row]], show: Callable[[str], None]) -> None:
    show("")
    show(f"{'on an H200':{NAME}}{'way':6}{'figure':28}{'measured':>12}{'must':>12}{'aim':>12}")
    for work, way, row in rows:
        target = work.targets.get(way)
        if target is None or row.get(target.figure) is None:
            continue
        value = row[target.figure]
        figures = "".join(f"{number:>12,.1f}" for number in (value, target.must, target.aim))
        show(f"{work.name:{NAME}}{way:6}{target.figure:28}{figures}  {_verdict(value, target)}")


def _verdict(value: float, target: Target) -> str:
    sign = -1 if target.figure in LESS_IS_MORE else 1
    if sign * value >= sign * target.aim:
        return "aim met"
    return "must met" if sign * value >= sign * target.must else "below must"


def _print_parts(rows: list[tuple[Work, str, Row]], show: Callable[[str], None]) -> None:
    profiled = [(work, row) for work, way, row in rows if way == "llm" and "parts_ms" in row]
    if not profiled:
        return
    show("")
    show(f"{'ms of a step':{NAME}}{'step':>10}" + "".join(f"{part:>13}" for part in PARTS))
    for work, row in profiled:
        if row["parts_ms"] is None:
            show(f"{work.name:{NAME}}{row['parts_missing']}")
            continue
        show(
            f"{work.name:{NAME}}{row['step_ms']:>10.3f}" + "".join(f"{row['parts_ms'][part]:>13.3f}" for part in PARTS)
        )
    for work, row in profiled[:1]:
        for kernel in row.get("kernels", ())[:TOP_KERNELS]:
            line = f"{kernel['ms']:9.3f} ms {kernel['calls']:7.1f} x  {kernel['part']:12}{kernel['name'][:70]}"
            show(f"  {work.name:12}{line}")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _short(value: Any) -> Any:
    """Four digits are what a run repeats."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if abs(value) < 1000 else round(value)
    if isinstance(value, dict):
        return {name: _short(inner) for name, inner in value.items()}
    return value
