"""The report of a simulation. It is a table for people, JSON for programs, and a picture. Knows
answers; simulates nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from penstock.disk import write_whole
from penstock.errors import UsageError
from penstock.simulate.goals import SHOWN
from penstock.simulate.planner import FleetAnswer
from penstock.status_line import duration

_TIMES = {"ttft": "first token", "tpot": "a token", "e2e": "whole"}
COLOURS = ("#0b6e99", "#c1582a", "#3c7d3c", "#7a4fa0")


def cost_of(answer: FleetAnswer, price: float | None) -> dict[str, float]:
    """Returns costs in dollars: of the whole simulated time, of an average hour, and of a million
    output tokens; empty if there is no price. price: dollars an hour of one GPU; None: the price in
    the table of step seconds, if it has one."""
    figures, each = answer.figures, answer.engine.steps.price if price is None else price
    if each is None:
        return {}
    whole = figures.gpu_seconds / 3600 * each
    tokens = figures.output_rate * figures.seconds
    return {
        "cost": whole,
        "cost_hour": whole / (figures.seconds / 3600),
        "cost_million_tokens": whole / tokens * 1e6 if tokens else math.inf,
    }


def as_json(answers: Sequence[FleetAnswer], price: float | None) -> str:
    """Returns a JSON list with one object an answer; infinite figures (of requests that never
    ended) are null."""
    return json.dumps([_told(answer, price) for answer in answers], indent=1, allow_nan=False)


def _told(answer: FleetAnswer, price: float | None) -> dict[str, Any]:
    steps = answer.engine.steps
    numbers = {**answer.figures.told(), **cost_of(answer, price)}
    return {
        "table": answer.engine.name,
        "model": steps.model,
        "device": steps.built_on.device,
        "load": answer.told,
        "replicas": answer.replicas,
        "gpus": answer.gpus,
        "simulated_replicas": answer.simulated,
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        "missed": {
            goal.name: reached if math.isfinite(reached) else None
            for goal, reached in answer.missed
        },
        "replicas_up": answer.counts,
    }


def as_text(answers: Sequence[FleetAnswer], price: float | None) -> str:
    """Returns a table with one row an answer, and below it notes on what was not simulated."""
    rows = [_cells(answer, price) for answer in answers]
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, *([row.get(name, "") for name in names] for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(names))]
    table = ["  ".join(map(str.rjust, line, widths)).rstrip() for line in lines]
    loads = dict.fromkeys(answer.told for answer in answers)
    return "\n".join([*loads, "", *table, *_notes(answers)])


def _cells(answer: FleetAnswer, price: float | None) -> dict[str, str]:
    figures, cost = answer.figures, cost_of(answer, price)
    cells = {
        "table": Path(answer.engine.name).name,
        "load": answer.told.partition(", ")[0],
        "replicas": f"{answer.replicas:,}",
        "GPUs": f"{answer.gpus:,}",
        "out tok/s": f"{figures.output_rate:,.0f}",
        "busy": f"{figures.busy:.0%}",
    }
    for measure, name in _TIMES.items():
        if measure in figures.times:
            cells[f"{name} p50, p95"] = ", ".join(
                _seconds(figures.percentile(measure, p)) for p in SHOWN
            )
    if not figures.times:
        cells["done in"] = (
            duration(figures.seconds) if figures.seconds >= 60 else _seconds(figures.seconds)
        )
    if answer.counts:
        least, most = (of(n for _, n in answer.counts) for of in (min, max))
        cells["replicas"], each = f"{least} to {most}", answer.engine.gpus
        cells["GPUs"] = f"{least * each} to {most * each}"
        cells["GPU hours"] = f"{figures.gpu_seconds / 3600:,.1f}"
    if cost:
        cells["cost"] = (
            f"${cost['cost']:,.2f}"
            if not figures.times or answer.counts
            else f"${cost['cost_hour']:,.2f}/h"
        )
        cells["$/M tokens"] = f"{cost['cost_million_tokens']:.3g}"
    if answer.goals:
        missed = ", ".join(f"{goal.name} {_seconds(at)}" for goal, at in answer.missed)
        cells["goals"] = f"missed: {missed}" if missed else "kept"
    return cells


def _seconds(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    if math.isinf(seconds):
        return "never"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _notes(answers: Sequence[FleetAnswer]) -> Iterator[str]:
    yield ""
    for answer in answers:
        if answer.simulated < answer.replicas:
            yield (
                f"{answer.replicas:,} replicas are alike: {answer.simulated} were simulated with"
                " their share of the requests, and counted so many times"
            )
        if answer.figures.preemptions:
            yield (
                f"{answer.figures.preemptions:,} samples gave their place up for want of KV, and"
                " came back"
            )
    yield "times are the engine's: HTTP and text come on top, some ms"


def write_picture(path: Path, answers: Sequence[FleetAnswer]) -> None:
    """Writes a PNG of the distribution of the requests' times, and of the number of replicas.
    Raises UsageError without matplotlib."""
    if find_spec("matplotlib") is None:
        raise UsageError(
            "a picture needs matplotlib: pip install 'penstock[plot]', or leave --picture out"
        )
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    shown = [answer for answer in answers if answer.figures.times]
    scaled = [answer for answer in answers if answer.counts]
    if not shown:
        raise UsageError(
            "a picture is of requests that arrive: a job has none; leave --picture out",
            param="picture",
        )
    panels = len(_TIMES) + bool(scaled)
    figure = Figure(figsize=(4 * panels, 3.6), dpi=150, layout="constrained")
    places = figure.subplots(1, panels)
    for axes, (measure, name) in zip(places, _TIMES.items(), strict=False):
        for answer, colour in zip(shown, COLOURS * len(shown), strict=False):
            _spread(axes, answer, measure, colour)
        axes.set(xscale="log", xlabel=f"{name}, s", ylim=(0, 100))
        axes.grid(color="#d8dee4", lw=0.6)
    places[0].set_ylabel("% of requests within")
    places[0].legend(fontsize=7, frameon=False)
    for answer, colour in zip(scaled, COLOURS * len(scaled), strict=False):
        places[-1].step(
            [at / 3600 for at, _ in answer.counts],
            [n for _, n in answer.counts],
            color=colour,
            where="post",
        )
        places[-1].set(xlabel="hours", ylabel="replicas up")
    figure.suptitle(answers[0].told, fontsize=9)
    content = BytesIO()
    figure.savefig(content, format="png")
    write_whole(path, content.getvalue())


def _spread(axes: Any, answer: FleetAnswer, measure: str, colour: str) -> None:
    found = sorted(answer.figures.times[measure].tolist())
    shares = [100 * (place + 1) / len(found) for place in range(len(found))]
    label = f"{Path(answer.engine.name).name}, {answer.replicas:,} replicas"
    axes.plot(found, shares, color=colour, lw=1.6, label=label)
    for goal, _ in answer.missed:
        if goal.measure == measure:
            axes.axvline(goal.most, color=colour, ls=":", lw=1)
