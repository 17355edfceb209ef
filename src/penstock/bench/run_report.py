"""What a run says to a person: a table in the terminal and table.txt, and report.html with everything in it.

The report needs no script, no font and no picture from elsewhere. It knows a record; every number in it is the
almanac's.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from penstock.almanac.figures import cost_of_million, cost_of_request, per_gpu, per_user
from penstock.almanac.record import Goal, Interval, Point, Record, Spread
from penstock.bench import charts
from penstock.bench.run_folder import RunFolder
from penstock.bench.slo_crossing import crossings, cut_off, goal_of, offered

WIDE = 200
SHORT_RUN = "short: windows, counts or starts below the method's; read it as a hint"


def print_table(record: Record, out: TextIO) -> None:
    """The points of a run, one a line; intervals are 95 %. Then the goals, what went wrong, and what marks mean."""
    table = Table(box=box.SIMPLE_HEAD, title=title(record), title_justify="left", pad_edge=False)
    goals = [f"< {goal:g} s" for goal in record.method.goals]
    columns = (
        "point",
        "requests/s",
        "output tok/s",
        "first p50, p95 ms",
        "per token ms",
        "end s",
        *goals,
        "failed",
        "",
    )
    for name in columns:
        table.add_column(name, justify="left" if name in ("point", "") else "right", no_wrap=True)
    marks = list(dict.fromkeys(mark for point in record.points for mark in point.marks))
    for point in ordered(record.points):
        table.add_row(*_cells(point, record, marks))
    if record.points:
        Console(file=out, width=WIDE, highlight=False).print(table)
    else:
        print(f"{title(record)}: no point could be measured", file=out)
    if marks:
        print("  ".join(f"{_letter(at)}: {mark}" for at, mark in enumerate(marks)), file=out)
    for crossing in crossings(record) if record.points else ():
        print(crossing.words(record.method.quantile), file=out)
    for told in costs(record):
        print(told, file=out)
    for failure in record.failures:
        print(f"failed: {failure.point or 'every point'}: {failure.kind}: {failure.message}", file=out)
    if record.method.short:
        print(SHORT_RUN, file=out)


def costs(record: Record) -> list[str]:
    """What requests and tokens cost at the stated price, and a GPU's part of the highest rate where there are more."""
    price, gpu, found = record.method.price_per_hour, record.machine.gpu, []
    whole = next((point for point in record.points if point.kind == "saturation" and not point.client.short), None)
    if whole is None:
        return []
    rates, least = whole.figures, cut_off(whole)  # of a lower bound of a rate comes an upper one of a cost
    if rates.request_rate is None or rates.output_rate is None or rates.total_rate is None:
        return []
    if gpu is not None and gpu.count > 1:
        part = per_gpu(rates.output_rate.value, gpu.count)
        found.append(f"everything at once, a GPU: {_bound(least)}{part:,.0f} output tok/s")
    if price is not None:
        request = cost_of_request(price, rates.request_rate.value)
        output, total = (cost_of_million(price, rate.value) for rate in (rates.output_rate, rates.total_rate))
        most = "≤ " if least else ""
        found.append(
            f"everything at once, at ${price:g} an hour: {most}${1000 * request:,.4g} a thousand requests, "
            f"{most}${output:,.4g} a million output tokens, {most}${total:,.4g} a million tokens in and out"
        )
    return found


def ordered(points: Sequence[Point]) -> list[Point]:
    """By kind, then by what was offered."""
    kinds = ("saturation", "single", "closed", "open")
    return sorted(points, key=lambda point: (kinds.index(point.kind), point.concurrency or 0, offered(point)))


def title(record: Record) -> str:
    return f"{record.engine.name} {record.engine.version}, {record.model.name}, {record.shape.name}, {machine(record)}"


def machine(record: Record) -> str:
    gpu = record.machine.gpu
    if gpu is None:
        return f"{record.machine.cpu}, {record.machine.cores_told}"
    return gpu.name if gpu.count == 1 else f"{gpu.count} x {gpu.name}"


def _cells(point: Point, record: Record, marks: Sequence[str]) -> list[str]:
    figures = point.figures
    goals = [goal_of(point, seconds) for seconds in record.method.goals]
    return [
        point.name,
        rate(figures.request_rate, 2, cut_off(point)),
        rate(figures.output_rate, 0, cut_off(point)),
        f"{_middle(figures.first_token, 'p50', 1e3, 0)}, {_middle(figures.first_token, 'p95', 1e3, 0)}",
        _middle(figures.per_token, "p50", 1e3, 2),
        _middle(figures.end_to_end, "p50", 1, 2),
        *map(_met, goals),
        str(point.requests - point.complete) if point.requests > point.complete else "",
        " ".join(_letter(at) for at, mark in enumerate(marks) if mark in point.marks),
    ]


def _met(goal: Goal | None) -> str:
    """A share with the digits that tell it from 95 and from 100 %."""
    return "-" if goal is None else f"{goal.share:.1%} [{goal.low:.1%}, {goal.high:.1%}]"


def _letter(at: int) -> str:
    return chr(ord("a") + at % 26) * (1 + at // 26)


def interval(value: Interval | None, times: float, digits: int) -> str:
    if value is None:
        return "-"
    if value.low is None or value.high is None:
        return f"{times * value.value:,.{digits}f}"
    return f"{times * value.value:,.{digits}f} [{times * value.low:,.{digits}f}, {times * value.high:,.{digits}f}]"


def rate(value: Interval | None, digits: int, cut: bool) -> str:
    """cut: off by its time limit, so that no upper end is known; then with ≥."""
    if value is None or not cut:
        return interval(value, 1, digits)
    low = f" (from {value.low:,.{digits}f})" if value.low is not None else ""
    return f"{_bound(cut)}{value.value:,.{digits}f}{low}"


def _bound(least: bool) -> str:
    return "≥ " if least else ""


def _middle(spread: Spread | None, name: str, times: float, digits: int) -> str:
    return f"{times * getattr(spread, name).value:,.{digits}f}" if spread is not None else "-"


# --- report.html


def write_report(folder: RunFolder, record: Record) -> None:
    text = io.StringIO()
    print_table(record, text)
    folder.write("table.txt", text.getvalue())
    folder.write("report.html", render(record))


def render(record: Record) -> str:
    """The report as HTML; every text of a record is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("penstock.bench", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    goals, points = record.method.goals, ordered(record.points)
    return environment.get_template("report.html.jinja").render(
        title=title(record),
        record=record,
        cards=cards(record),
        crossings=[crossing.words(record.method.quantile) for crossing in crossings(record) if record.points],
        costs=costs(record),
        pictures=[
            ("First token against the offered rate", "Poisson arrivals; bars are 95 % intervals.",
             Markup(charts.latency(points, goals))),
            ("Share of requests with their first token by then", "Failed ones never had one: such a curve ends lower.",
             Markup(charts.shares(points))),
        ],
        goals=goals,
        rows=[_row(point, goals) for point in points],
        spreads=[(point.name, name, cells) for point in points for name, cells in _spreads(point)],
        facts=facts(record),
        short=SHORT_RUN if record.method.short else "",
    )  # fmt: skip


def cards(record: Record) -> list[tuple[str, str]]:
    """The two ends of the curve, in large figures."""
    found = []
    for point in record.points:
        figures = point.figures
        if point.kind == "saturation" and figures.output_rate and figures.request_rate:
            least = _bound(cut_off(point))
            found.append(("everything at once", f"{least}{figures.output_rate.value:,.0f} output tok/s"))
            found.append(("everything at once", f"{least}{figures.request_rate.value:,.2f} requests/s"))
        if point.kind == "single" and figures.first_token and figures.per_token:
            found.append(("one at a time, first token", f"{1e3 * figures.first_token.p50.value:,.0f} ms"))
            token = figures.per_token.p50.value
            found.append(("one at a time, per token", f"{1e3 * token:,.2f} ms ({per_user(token):,.0f} tok/s)"))
    return found


def _row(point: Point, goals: Sequence[float]) -> dict[str, object]:
    figures = point.figures
    met = [goal_of(point, seconds) for seconds in goals]
    return {
        "name": point.name,
        "requests": rate(figures.request_rate, 2, cut_off(point)),
        "output": rate(figures.output_rate, 0, cut_off(point)),
        "total": rate(figures.total_rate, 0, cut_off(point)),
        "goals": [f"{_met(goal)}, {goal.goodput:,.2f}/s" if goal else "-" for goal in met],
        "counts": f"{point.complete:,} of {point.requests:,}",
        "outcomes": ", ".join(f"{count:,} {name}" for name, count in point.outcomes.items()),
        "marks": ", ".join(point.marks),
    }


def _spreads(point: Point) -> list[tuple[str, list[str]]]:
    """Times in milliseconds, with their intervals."""
    named = {
        "first token": point.figures.first_token, "between tokens": point.figures.inter_token,
        "per token": point.figures.per_token, "whole answer": point.figures.end_to_end,
    }  # fmt: skip
    return [
        (name, [interval(getattr(spread, each), 1e3, 1) for each in ("mean", "p50", "p90", "p95", "p99")])
        for name, spread in named.items()
        if spread is not None
    ]


def facts(record: Record) -> list[tuple[str, str]]:
    """What is needed to run it again."""
    engine, client, method, gpu = record.engine, record.client, record.method, record.machine.gpu
    ceiling = f"{client.ceiling_events:,.0f} events/s" if client.ceiling_events else "not calibrated"
    return [
        ("measured with", client.command),
        ("engine", f"{engine.name} {engine.version}"),
        ("its command", engine.command),
        ("its environment", " ".join(f"{name}={value}" for name, value in engine.configuration.environment.items())),
        ("model", f"{record.model.name}, {record.model.dtype}, {record.model.weights} weights, "
                  f"{f'{record.model.parameters:,} parameters' if record.model.parameters else 'parameters unknown'}"),
        ("machine", f"{f'{machine(record)}; ' if gpu else ''}{record.machine.cpu}, {record.machine.cores_told}, "
                    f"{record.machine.memory_mib:,} MiB, {record.machine.system}"),
        ("GPU's driver and clocks", f"{gpu.driver}; {gpu.clocks}" if gpu else "no GPU"),
        ("prompts", f"{record.shape.prompts}, seed {client.seed}, temperature {record.shape.temperature:g}"),
        ("client", f"penstock {client.penstock} ({client.commit or 'no checkout'}), {client.processes} processes, "
                   f"ceiling {ceiling}, Python {record.machine.python}"),
        ("method", f"{method.starts} starts, warm-up {method.warm_up:g} s, windows up to {method.window:g} s, "
                   f"{method.enough:,} requests near a crossing"),
        ("run", f"{record.run}, {record.when}"),
        ("raw data", f"raw.parquet, {record.raw.rows:,} rows, sha256 {record.raw.sha256}" if record.raw else "none"),
    ]  # fmt: skip
