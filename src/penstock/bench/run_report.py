"""The report of a run. It is a table in the terminal and in table.txt, and the almanac's page of
its record.

Knows a benchmark record; the almanac derives every number.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from penstock.almanac.machine_spread import shown
from penstock.almanac.page.build import build
from penstock.almanac.page.compact import machine_label
from penstock.almanac.record import Goal, Interval, Point, Record, Spread
from penstock.almanac.samples import OK
from penstock.bench.run_folder import RunFolder
from penstock.bench.slo_crossing import crossings, cut_off, goal_of, offered

WIDE = 200
SHORT_RUN = "short: windows, counts or starts below the method's; read it as a hint"
EDITION_RUN = (
    "edition: two starts, windows of 20 s; intervals hold another machine of this kind: {} where"
    " the GPU was busy, {} where the host decided or nobody knows"
)


def print_table(record: Record, out: TextIO) -> None:
    """Prints a run's load levels, one a line, with 95 % intervals; then the latency goals, the
    failures, and the meaning of the marks."""
    table = Table(box=box.SIMPLE_HEAD, title=title(record), title_justify="left", pad_edge=False)
    goals = [f"< {goal:g} s" for goal in record.method.goals]
    powered = any(point.board for point in record.points)
    columns = (
        "point",
        "requests/s",
        "output tok/s",
        "first p50, p95 ms",
        "per token ms",
        "end s",
        *(["W, J/token"] if powered else []),
        *goals,
        "incomplete",
        "",
    )
    for name in columns:
        table.add_column(name, justify="left" if name in ("point", "") else "right", no_wrap=True)
    marks = list(dict.fromkeys(mark for point in record.points for mark in point.marks))
    for point in ordered(shown(record)):
        table.add_row(*_cells(point, record, marks))
    if record.points:
        Console(file=out, width=WIDE, highlight=False).print(table)
    else:
        print(f"{title(record)}: no point could be measured", file=out)
    if marks:
        print("  ".join(f"{_letter(at)}: {mark}" for at, mark in enumerate(marks)), file=out)
    for point in ordered(record.points):
        if short := [
            f"{count:,} {name}" for name, count in sorted(point.outcomes.items()) if name != OK
        ]:
            print(f"incomplete of what {point.name} measured: {', '.join(short)}", file=out)
    for crossing in crossings(record) if record.points else ():
        print(crossing.words(record.method.quantile), file=out)
    for told in costs(record):
        print(told, file=out)
    for failure in record.failures:
        print(
            f"failed: {failure.point or 'every point'}: {failure.kind}: {failure.message}", file=out
        )
    if not powered:
        print("power was not measured", file=out)
    if (answers := record.answers) is not None:
        print(
            f"answers {'wrongly: ranked last' if answers.wrong else 'rightly'}: divergence"
            f" {answers.kl:.3g} nats from transformers in float32, {answers.agree:.1%} of tokens"
            f" alike, with {' '.join(answers.flags) or 'no flags'}",
            file=out,
        )
    if record.method.edition is not None:
        print(EDITION_RUN.format(*map(_percent, record.method.edition.ends)), file=out)
    elif record.method.short:
        print(SHORT_RUN, file=out)


def _percent(away: float) -> str:
    return f"{math.expm1(away):.0%}"


def costs(record: Record) -> list[str]:
    """Returns lines with the cost of requests and tokens at the machine's price, and, with several
    GPUs, one GPU's part of the highest rate."""
    price, gpu, found = record.method.price_per_hour, record.machine.gpu, []
    whole = next(
        (point for point in record.points if point.kind == "saturation" and not point.client.short),
        None,
    )
    if whole is None:
        return []
    # the low end of a rate gives the high end of its cost
    rates, least = (
        whole.figures,
        cut_off(whole),
    )
    if rates.request_rate is None or rates.output_rate is None or rates.total_rate is None:
        return []
    if gpu is not None and gpu.count > 1:
        part = rates.output_rate.value / gpu.count
        found.append(f"everything at once, a GPU: {'≥ ' if least else ''}{part:,.0f} output tok/s")
    if price is not None:
        request, output, total = (
            price / 3600 / rate.value if rate.value else math.inf
            for rate in (rates.request_rate, rates.output_rate, rates.total_rate)
        )
        most = "≤ " if least else ""
        found.append(
            f"everything at once, at ${price:g} an hour: {most}${1000 * request:,.4g} a thousand"
            f" requests, {most}${1e6 * output:,.4g} a million output tokens,"
            f" {most}${1e6 * total:,.4g} a million tokens in and out"
        )
    return found


def ordered(points: Sequence[Point]) -> list[Point]:
    """Sorts load levels by kind, then by their load."""
    kinds = ("saturation", "single", "closed", "open")
    return sorted(
        points, key=lambda point: (kinds.index(point.kind), point.concurrency or 0, offered(point))
    )


def title(record: Record) -> str:
    engine, machine = record.engine, machine_label(record)
    return f"{engine.name} {engine.version}, {record.model.name}, {record.shape.name}, {machine}"


def _cells(point: Point, record: Record, marks: Sequence[str]) -> list[str]:
    figures = point.figures
    goals = [goal_of(point, seconds) for seconds in record.method.goals]
    return [
        point.name,
        rate(figures.request_rate, 2, cut_off(point)),
        rate(figures.output_rate, 0, cut_off(point)),
        (
            f"{_middle(figures.first_token, 'p50', 1e3, 0)},"
            f" {_middle(figures.first_token, 'p95', 1e3, 0)}"
        ),
        _middle(figures.per_token, "p50", 1e3, 2),
        _middle(figures.end_to_end, "p50", 1, 2),
        *([_power(point)] if any(each.board for each in record.points) else []),
        *map(_met, goals),
        str(point.requests - point.complete) if point.requests > point.complete else "",
        " ".join(_letter(at) for at, mark in enumerate(marks) if mark in point.marks),
    ]


def _power(point: Point) -> str:
    """Returns the boards' power and the joules of an output token; a dash: not measured."""
    if point.board is None:
        return "-"
    joules = point.board.joules_per_token
    return (
        f"{point.board.watts:,.0f}, {joules.value:.3g}" if joules else f"{point.board.watts:,.0f}"
    )


def _met(goal: Goal | None) -> str:
    """Returns the share of requests that met a latency goal as text, with enough digits to tell it
    from 95 % and 100 %."""
    return "-" if goal is None else f"{goal.share:.1%} [{goal.low:.1%}, {goal.high:.1%}]"


def _letter(at: int) -> str:
    return chr(ord("a") + at % 26) * (1 + at // 26)


def rate(value: Interval | None, digits: int, cut: bool) -> str:
    """Returns a rate as text. cut: the load level was cut off by its time limit, so its upper end
    is unknown and the text begins with ≥."""
    if value is None:
        return "-"
    told, low, high = (
        f"{each:,.{digits}f}" if each is not None else ""
        for each in (value.value, value.low, value.high)
    )
    if cut:
        return f"≥ {told} (from {low})" if low else f"≥ {told}"
    return f"{told} [{low}, {high}]" if low and high else told


def _middle(spread: Spread | None, name: str, times: float, digits: int) -> str:
    return f"{times * getattr(spread, name).value:,.{digits}f}" if spread is not None else "-"


def write_report(folder: RunFolder, record: Record) -> Path:
    """Writes table.txt and the almanac's page of this benchmark record; returns the page's path."""
    text = io.StringIO()
    print_table(record, text)
    folder.write("table.txt", text.getvalue())
    build([record], folder.path / "report")
    return folder.path / "report" / "index.html"
