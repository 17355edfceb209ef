"""The results of a sampling job. They are a table on the terminal, summary.json, report.html (one
file with everything in it) and coverage.png. Knows the summary and the rows of samples.jsonl, no
engine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.disk import write_whole
from penstock.jobs.curve import interval, png, svg
from penstock.status_line import duration, percent

Summary = Mapping[str, Any]
Rows = Callable[[], Iterator[dict[str, Any]]]
SHOWN_SAMPLES = 3  # number of right samples in the report, and of wrong ones
SHOWN_PROBLEMS = 500  # most problems in the table; a note tells that there are more


def print_table(summary: Summary, out: Path) -> None:
    """Prints a table of the job's results to stdout."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    count = summary["problems"]
    title = f"Coverage over {count} problem" + "s" * (count != 1)
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("k", "pass@k", "95 % interval"):
        table.add_column(name, justify="right")
    for point in summary["coverage"]:
        table.add_row(f"{point['k']:,}", percent(point["value"]), interval(point))
    console.print(table)
    for name, value in facts(summary):
        console.print(f"  {name:<22}{value}")
    for failed in summary["failed"]:
        console.print(
            f"  row {failed['problem'] + 1} was not sampled in full: {failed['error']}",
            soft_wrap=True,
        )
    console.print(f"\n  report: {out / 'report.html'}", soft_wrap=True)


def facts(summary: Summary) -> list[tuple[str, str]]:
    """Returns name and value of each figure beside the coverage, as text for people."""
    speed = summary["speed"]
    reasons = ", ".join(
        f"{count:,} {reason}" for reason, count in summary["finish_reasons"].items()
    )
    rows = [
        ("majority vote", percent(summary["majority_vote"])),
        ("samples", f"{summary['samples']:,} ({reasons})"),
        ("length", f"{summary['mean_length']:.1f} tokens mean, {summary['longest']:,} longest"),
    ]
    if (rule := summary["settings"].get("stop_when")) is not None:
        of = "pass@n is at least this" if rule != "right" else "no other k can be told"
        rows.append(("stopped early", f"{rule}; {of}"))
    if speed["samples"]:
        rows += [
            ("output speed", f"{speed['output_tokens_per_second']:,.0f} tok/s"),
            (
                "total speed",
                f"{speed['total_tokens_per_second']:,.0f} tok/s, each prompt counted once",
            ),
            ("time", f"{duration(speed['seconds'])} for {speed['samples']:,} samples"),
        ]
    return rows


def write_reports(out: Path, summary: Summary, rows: Rows) -> None:
    """Writes the report's files, each whole or not at all. Without matplotlib the picture is left
    out and a line says so.

    Raises JournalError or CapacityError as the journal does.
    """
    write_whole(
        out / "summary.json", (json.dumps(summary, ensure_ascii=False, indent=2) + "\n").encode()
    )
    write_whole(out / "report.html", render(summary, rows()).encode())
    if find_spec("matplotlib") is None:
        print(
            'penstock: coverage.png is left out: it needs pip install "penstock[plot]"',
            file=sys.stderr,
        )
        return
    write_whole(out / "coverage.png", png(summary["coverage"], title(summary)))


def title(summary: Summary) -> str:
    settings = summary["settings"]
    model = Path(settings["model"]).name if "/" in settings["model"] else settings["model"]
    return f"{model}: {summary['problems']} problems, {settings['n']:,} samples each"


def render(summary: Summary, rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns the report as HTML; every text from a model or a file is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("penstock.jobs", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["percent"] = percent
    problems = summary["per_problem"]
    right, wrong = pick_samples(rows)
    return environment.get_template("report.html.jinja").render(
        title=title(summary),
        summary=summary,
        facts=facts(summary),
        curve=Markup(svg(summary["coverage"])),
        interval=interval,
        settings={name: value for name, value in summary["settings"].items() if value is not None},
        problems=problems[:SHOWN_PROBLEMS],
        left_out=max(0, len(problems) - SHOWN_PROBLEMS),
        questions={problem["problem"]: problem for problem in problems},
        samples=[("Right", right), ("Wrong", wrong)],
    )


def pick_samples(
    rows: Iterable[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Returns a few right and a few wrong samples. They come from problems spread over the run, at
    most one right and one wrong sample of each."""
    first: dict[bool, dict[int, Mapping[str, Any]]] = {True: {}, False: {}}
    for row in rows:
        there = first[row["right"]].get(row["problem"])
        if there is None or row["sample"] < there["sample"]:
            first[row["right"]][row["problem"]] = row
    return _spread(first[True]), _spread(first[False])


def _spread(by_problem: Mapping[int, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    ordered = [by_problem[index] for index in sorted(by_problem)]
    count = min(SHOWN_SAMPLES, len(ordered))
    return [ordered[i * len(ordered) // count] for i in range(count)]
