"""Compares two measured runs. The results are ratios of their figures, each with its 95 % interval.

A ratio's interval is derived from the two figures' intervals (MOVER: Donner and Zou, 2012, on the
logarithms), each end separately. An interval that contains 1 is "no significant difference". Knows
records alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from penstock.almanac.figures import Kept
from penstock.almanac.machine_spread import apart_at_most, over, shown
from penstock.almanac.parse_record import read_record
from penstock.almanac.record import Interval, Point, Record
from penstock.bench.run_report import title
from penstock.bench.slo_crossing import crossings, cut_off, in_three
from penstock.errors import UsageError

SAME = "no significant difference"
UNKNOWN = "too few requests to say"
CUT = "a rate that was cut off has no upper end: nobody can say"
UNTRIED = "nobody can say by the rates that were tried"
CLIENT_SHORT = "not ranked: the client may have been the bottleneck"
RECORD = "record.json"
WIDE = 150
# Figures to compare at each kind of point: (words, field of Figures, quantile or None for a rate).
COMPARED = {
    "saturation": (("requests/s", "request_rate", None), ("output tok/s", "output_rate", None)),
    "single": (
        ("first token p50", "first_token", "p50"),
        ("per token p50", "per_token", "p50"),
        ("whole answer p50", "end_to_end", "p50"),
    ),
    "closed": (("output tok/s", "output_rate", None), ("first token p95", "first_token", "p95")),
    "open": (("first token p95", "first_token", "p95"), ("per token p50", "per_token", "p50")),
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratio of a figure of run B over that of run A. low, high: ends of its 95 % interval;
    None: unknown. more_is_better: True for a rate, False for a time. short: the client was a
    possible bottleneck in A or B. cut: for A and for B, True if the load level was cut off by its
    time limit, so that its rate is a lower bound.
    """

    point: str
    figure: str
    a: float
    b: float
    low: float | None
    high: float | None
    more_is_better: bool
    short: bool = False
    cut: tuple[bool, bool] = (False, False)

    @property
    def verdict(self) -> str:
        if self.short:
            return CLIENT_SHORT
        more = is_more(self.low, self.high)
        if more is not None:
            return "B is better" if more == self.more_is_better else "A is better"
        if self.low is None or self.high is None:
            return CUT if any(self.cut) else UNKNOWN
        return SAME


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two runs. goals: lines about the highest rates that meet each latency goal,
    and about load levels that only one run has. differs: lines about differences between the runs
    other than the engine, and about failures."""

    a: Record
    b: Record
    ratios: list[Ratio]
    goals: list[str]
    differs: list[str]


def record_at(path: Path) -> Record:
    """Reads a benchmark record from a file, from a workload shape's folder, or from a run's folder
    with one shape. Raises UsageError and RecordError."""
    if path.is_dir():
        found = [path / RECORD] if (path / RECORD).is_file() else sorted(path.glob(f"*/{RECORD}"))
        if len(found) != 1:
            told = ", ".join(str(each.parent) for each in found[:9]) or "none"
            raise UsageError(
                f"{path} holds {len(found)} records, give one's folder: {told}", param="record"
            )
        path = found[0]
    return read_record(path)


def compare(a: Record, b: Record) -> Comparison:
    """Compares two records. Raises UsageError for runs that have nothing in common."""
    if alike := _unlike_shape(a, b):
        raise UsageError(f"the runs cannot be compared: {alike}", param="record")
    others = {point.name: point for point in shown(b)}
    both = [(point, others[point.name]) for point in shown(a) if point.name in others]
    ratios = [ratio for one, other in both for ratio in _ratios(one, other)]
    return Comparison(a, b, ratios, [*_goals(a, b), *_missing(a, b)], list(_differs(a, b)))


def ratio_ends(a: Interval, b: Interval) -> tuple[float | None, float | None]:
    """Returns the 95 % interval of b over a. The low end needs b's low and a's high, the high end
    b's high and a's low; an end is None if one of its two is None."""
    if a.value <= 0 or b.value <= 0:
        return None, None
    middle, low, high = math.log(b.value / a.value), None, None
    if b.low is not None and a.high is not None:
        low = math.exp(middle - math.hypot(_apart(b.low, b.value), _apart(a.value, a.high)))
    if b.high is not None and a.low is not None:
        above = math.hypot(_apart(b.value, b.high), _apart(a.low, a.value))
        high = math.exp(middle + above) if above < 700 else math.inf
    return low, high


def is_more(low: float | None, high: float | None) -> bool | None:
    """Returns True if a ratio with this interval is surely above 1, False if surely below, else
    None."""
    if low is not None and low > 1:
        return True
    return False if high is not None and high < 1 else None


def _apart(low: float, high: float) -> float:
    """Returns the distance of two logarithms; infinite when `low` is 0."""
    return math.log(high / low) if low > 0 else math.inf


def _ratios(one: Point, other: Point) -> Iterator[Ratio]:
    for words, figure, quantile in COMPARED[one.kind]:
        a, b = _interval(one, figure, quantile), _interval(other, figure, quantile)
        if a is not None and b is not None:
            low, high = ratio_ends(a, b)
            short, rate = one.client.short or other.client.short, quantile is None
            cut = (rate and cut_off(one), rate and cut_off(other))
            yield Ratio(one.name, words, a.value, b.value, low, high, rate, short, cut)


def _interval(point: Point, figure: str, quantile: str | None) -> Interval | None:
    found = getattr(point.figures, figure)
    value: Interval | None = (
        found if quantile is None or found is None else getattr(found, quantile)
    )
    return value


def _goals(a: Record, b: Record) -> Iterator[str]:
    """Yields, for each latency goal, the highest rates of A and of B that meet it, and their ratio.
    (The almanac's page shows the same intervals. It also interpolates between the highest rate that
    meets a latency goal and the next one.)
    """
    theirs = {crossing.seconds: crossing for crossing in crossings(b)}
    for one in crossings(a):
        other = theirs.get(one.seconds)
        if other is None:
            continue
        words = f"first token within {one.seconds:g} s"
        if one.kept.rate is None or other.kept.rate is None:
            pairs = (("A", one), ("B", other))
            yield f"{words}: " + "; ".join(
                f"{name}: {each.none}" for name, each in pairs if each.kept.rate is None
            )
            continue
        rates = (
            f"A up to {in_three(one.kept.rate)} requests a second, B up to"
            f" {in_three(other.kept.rate)}"
        )
        low, high = ratio_ends(_ends(one.kept, a), _ends(other.kept, b))
        alike = is_more(low, high) is None
        told = f"{between(low, high)}{f': {SAME}' if alike else ''}"
        yield f"{words}: {rates}; B / A {UNTRIED if alike and None in (low, high) else told}"


def _ends(kept: Kept, record: Record) -> Interval:
    """Returns the highest rate that meets the latency goal; the interval's ends are the rates that
    meet and that miss it with 95 % confidence, with an edition's term for another machine."""
    ends = Interval(value=kept.rate or 0.0, low=kept.low, high=kept.high)
    return over(ends, apart_at_most(record))


def _missing(a: Record, b: Record) -> Iterator[str]:
    """Yields saturation and single load levels that only one of the records has."""
    for word, record, other in (("A", a, b), ("B", b, a)):
        there = {point.name for point in other.points}
        for point in record.points:
            if point.name not in there and point.kind in ("saturation", "single"):
                yield f"{point.name} is in {word} alone"


def between(low: float | None, high: float | None) -> str:
    """Returns an interval as text; None is an unknown end."""
    if low is None or high is None:
        return (
            f"at least {low:.2f}"
            if low is not None
            else f"at most {high:.2f}"
            if high is not None
            else "-"
        )
    return f"{low:.2f} to {high:.2f}"


def _unlike_shape(a: Record, b: Record) -> str | None:
    for name in ("kind", "input", "output", "n"):
        one, other = getattr(a.shape, name), getattr(b.shape, name)
        if one != other:
            return f"A is of shape {a.shape.name}, B of {b.shape.name} ({name} {one} and {other})"
    return None


def _differs(a: Record, b: Record) -> Iterator[str]:
    pairs = {
        "model": (a.model.name, b.model.name),
        "weights": (a.model.weights, b.model.weights),
        "dtype": (a.model.dtype, b.model.dtype),
        "GPU": (_gpu(a), _gpu(b)),
        "CPU": (a.machine.cpu, b.machine.cpu),
        "cores": (a.machine.cores_told, b.machine.cores_told),
        "prompts": (a.shape.prompts, b.shape.prompts),
        "temperature": (a.shape.temperature, b.shape.temperature),
        "requests at once": (_at_once(a), _at_once(b)),
        "share of first tokens in time": (a.method.quantile, b.method.quantile),
    }
    for name, (one, other) in pairs.items():
        # None: that load level is missing, which is reported separately
        if one != other and None not in (one, other):
            yield f"not alike: {name}: A {one}, B {other}"
    for word, record in (("A", a), ("B", b)):
        if record.engine.lacks:
            yield f"not alike: {word}'s installation lacks {', '.join(record.engine.lacks)}"
        if record.method.short:
            yield f"not alike: {word} is {'an edition' if record.method.edition else 'a short run'}"
        if marked := sorted({point.name for point in record.points if point.client.short}):
            yield f"not alike: {word}'s client may have been the bottleneck at {', '.join(marked)}"
        for failure in record.failures:
            yield (
                f"{word} failed: {failure.point or 'every point'}: {failure.kind}:"
                f" {failure.message}"
            )


def _gpu(record: Record) -> str:
    gpu = record.machine.gpu
    return f"{gpu.count} x {gpu.name}" if gpu is not None else "none"


def _at_once(record: Record) -> int | None:
    return next((point.requests for point in record.points if point.kind == "saturation"), None)


# --- the comparison as text


def print_comparison(made: Comparison, out: TextIO) -> None:
    """Prints a table of ratios, the latency goals, and the differences between the runs."""
    print(f"A: {title(made.a)}, {made.a.engine.configuration.name}, run {made.a.run}", file=out)
    print(f"B: {title(made.b)}, {made.b.engine.configuration.name}, run {made.b.run}", file=out)
    for line in made.differs:
        print(line, file=out)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("point", "figure", "A", "B", "B / A", "95 % interval", ""):
        table.add_column(
            name, justify="left" if name in ("point", "figure", "") else "right", no_wrap=True
        )
    for ratio in made.ratios:
        table.add_row(*_cells(ratio))
    if made.ratios:
        Console(file=out, width=WIDE, highlight=False).print(table)
    else:
        print("no figure is in both: there is nothing to compare", file=out)
    for line in made.goals:
        print(line, file=out)
    known = sum(ratio.verdict not in (UNKNOWN, CUT) for ratio in made.ratios)
    if known > 5:
        print(
            f"{known} figures are compared: of so many, one in twenty would seem to differ by"
            " chance alone",
            file=out,
        )


def _cells(ratio: Ratio) -> tuple[str, ...]:
    a, b = (
        f"{'≥ ' if cut else ''}{each:,.2f}" if ratio.more_is_better else f"{1e3 * each:,.1f} ms"
        for each, cut in zip((ratio.a, ratio.b), ratio.cut, strict=True)
    )
    bound = {(False, True): "≥ ", (True, False): "≤ "}.get(ratio.cut, "")
    quotient = f"{bound}{ratio.b / ratio.a:.2f}" if ratio.a > 0 and not all(ratio.cut) else "-"
    return ratio.point, ratio.figure, a, b, quotient, between(ratio.low, ratio.high), ratio.verdict
