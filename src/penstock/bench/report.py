"""What a run says to a person: a table in the terminal and table.txt, and report.html by itself.

It knows a record; every number in it is the almanac's.
"""

from __future__ import annotations

import io
from typing import TextIO

from rich.console import Console
from rich.table import Table

from penstock.almanac.record import Interval, Point, Record, Spread
from penstock.bench.run_folder import RunFolder

WIDE = 150


def print_table(record: Record, out: TextIO) -> None:
    """The points of a run, one a line; intervals are 95 %."""
    shape, engine = record.shape, record.engine
    machine = record.machine.gpu.name if record.machine.gpu else f"{record.machine.cpu}, {record.machine.cores} cores"
    table = Table(
        title=f"{engine.name} {engine.version}  {record.model.name}  {shape.name}  {machine}", title_justify="left"
    )
    for name in ("point", "requests/s", "output tok/s", "first token p50, p95 ms", "per token p50 ms", "end p50 s"):
        table.add_column(name, justify="left" if name == "point" else "right")
    for goal in record.method.goals:
        table.add_column(f"first < {goal:g} s", justify="right")
    table.add_column("failed", justify="right")
    table.add_column("marks")
    for point in record.points:
        table.add_row(*_cells(point, record))
    width = Console(file=out).width if out.isatty() else WIDE
    Console(file=out, width=width, highlight=False).print(table)
    for failure in record.failures:
        print(f"failed: {failure.point or 'start'}: {failure.kind}: {failure.message}", file=out)
    if record.method.short:
        print("short: windows, counts or starts below the method's; read it as a hint", file=out)


def _cells(point: Point, record: Record) -> list[str]:
    figures = point.figures
    cells = [point.name, _interval(figures.request_rate, 2), _interval(figures.output_rate, 0)]
    cells.append(_pair(figures.first_token))
    cells.append(_number(figures.per_token.p50 if figures.per_token else None, 1e3, 2))
    cells.append(_number(figures.end_to_end.p50 if figures.end_to_end else None, 1, 2))
    met = {goal.seconds: goal for goal in point.goals}
    for seconds in record.method.goals:
        goal = met.get(seconds)
        cells.append(f"{goal.share:.1%} [{goal.low:.1%}, {goal.high:.1%}]" if goal else "-")
    cells.append(str(point.requests - point.complete) if point.requests > point.complete else "")
    cells.append(", ".join(point.marks))
    return cells


def _interval(value: Interval | None, digits: int) -> str:
    if value is None:
        return "-"
    ends = (
        f" [{value.low:,.{digits}f}, {value.high:,.{digits}f}]"
        if value.low is not None and value.high is not None
        else ""
    )
    return f"{value.value:,.{digits}f}{ends}"


def _pair(spread: Spread | None) -> str:
    return f"{1e3 * spread.p50.value:,.0f}, {1e3 * spread.p95.value:,.0f}" if spread else "-"


def _number(value: Interval | None, times: float, digits: int) -> str:
    return f"{times * value.value:,.{digits}f}" if value else "-"


def write_report(folder: RunFolder, record: Record) -> None:
    text = io.StringIO()
    print_table(record, text)
    folder.write("table.txt", text.getvalue())
