"""Two measured runs against each other: ratios of their figures, each with its 95 % interval.

The interval of a ratio comes of the two figures' own (MOVER: Donner and Zou, 2012, on the logarithms), each end by
itself. One that contains 1 is "no significant difference". It knows records alone.
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

from penstock.almanac.parse_record import read_record
from penstock.almanac.record import Interval, Point, Record
from penstock.bench.run_report import title
from penstock.bench.slo_crossing import Crossing, crossings, cut_off, in_three
from penstock.errors import UsageError

SAME = "no significant difference"
UNKNOWN = "too few requests to say"
CUT = "a rate that was cut off has no upper end: nobody can say"
UNTRIED = "nobody can say by the rates that were tried"
CLIENT_SHORT = "not ranked: the client may have been the bottleneck"
RECORD = "record.json"
WIDE = 150
# What is compared at each kind of point: (words, figure, its quantile or None for a rate).
COMPARED = {
    "saturation": (("requests/s", "request_rate", None), ("output tok/s", "output_rate", None)),
    "single": (
        ("first token p50", "first_token", "p50"), ("per token p50", "per_token", "p50"),
        ("whole answer p50", "end_to_end", "p50"),
    ),
    "closed": (("output tok/s", "output_rate", None), ("first token p95", "first_token", "p95")),
    "open": (("first token p95", "first_token", "p95"), ("per token p50", "per_token", "p50")),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ratio:
    """B over A. low, high: of its 95 % interval, None: not known. more_is_better: a rate, not a time. short: the client
    of one of them was. cut: the point of A, of B was cut off by its time limit, so that its rate is a lower bound."""

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
    """differs: in what the runs are not alike beside the engine. missing: points that only one of them has. failures:
    of either, in words."""

    a: Record
    b: Record
    ratios: list[Ratio]
    goals: list[str]
    differs: list[str]
    missing: list[str]
    failures: list[str]


def record_at(path: Path) -> Record:
    """Reads the record of a file, of a shape's folder, or of a run's with one shape. Raises UsageError and
    RecordError."""
    if path.is_dir():
        found = [path / RECORD] if (path / RECORD).is_file() else sorted(path.glob(f"*/{RECORD}"))
        if len(found) != 1:
            told = ", ".join(str(each.parent) for each in found[:9]) or "none"
            raise UsageError(f"{path} holds {len(found)} records, give one's folder: {told}", param="record")
        path = found[0]
    return read_record(path)


def compare(a: Record, b: Record) -> Comparison:
    """Raises UsageError for runs that have nothing in common."""
    if alike := _unlike_shape(a, b):
        raise UsageError(f"the runs cannot be compared: {alike}", param="record")
    others = {point.name: point for point in b.points}
    both = [(point, others[point.name]) for point in a.points if point.name in others]
    named = {point.name for point, _ in both}
    missing = [
        f"{point.name} is in {word} alone"
        for word, record in (("A", a), ("B", b))
        for point in record.points
        if point.name not in named and point.kind in ("saturation", "single")
    ]
    ratios = [ratio for one, other in both for ratio in _ratios(one, other)]
    return Comparison(a, b, ratios, list(_goals(a, b)), list(_differs(a, b)), missing, list(_failures(a, b)))


def ratio_ends(a: Interval, b: Interval) -> tuple[float | None, float | None]:
    """Returns the 95 % interval of b over a. An end is None where one of the two that it comes of is: the low one comes
    of b's low and a's high, the high one of b's high and a's low."""
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
    """Returns whether a ratio with this interval is surely above 1, or surely below; None: neither."""
    if low is not None and low > 1:
        return True
    return False if high is not None and high < 1 else None


def _apart(low: float, high: float) -> float:
    """Returns the distance of two logarithms; the lower one of 0 lies without end below."""
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
    value: Interval | None = found if quantile is None or found is None else getattr(found, quantile)
    return value


def _goals(a: Record, b: Record) -> Iterator[str]:
    """Yields the rates up to which first tokens come in time, and their ratio. (The almanac's page has the same ends.
    Between the highest rate that keeps a goal and the next one it draws a line, and says where that passes the
    goal.)"""
    theirs = {crossing.seconds: crossing for crossing in crossings(b)}
    for one in crossings(a):
        other = theirs.get(one.seconds)
        if other is None:
            continue
        words = f"first token within {one.seconds:g} s"
        ours, others = _kept(one), _kept(other)
        if ours is None or others is None:
            none = "; ".join(f"{name}: {each.none}" for name, each in (("A", one), ("B", other)) if each.meets is None)
            yield f"{words}: {none}"
            continue
        told = f"{words}: A up to {in_three(ours.value)} requests a second, B up to {in_three(others.value)}"
        yield f"{told}; B / A {_between(*ratio_ends(ours, others))}"


def _kept(one: Crossing) -> Interval | None:
    """Returns the highest rate that keeps the goal, between those that are surely kept and surely not."""
    return None if one.meets is None else Interval(value=one.meets, low=one.keeps, high=one.misses)


def _between(low: float | None, high: float | None) -> str:
    """Returns a ratio's interval, and what it says."""
    if is_more(low, high) is None:
        return UNTRIED if low is None or high is None else f"{between(low, high)}: {SAME}"
    return between(low, high)


def between(low: float | None, high: float | None) -> str:
    """Returns an interval in words; None: nobody knows that end."""
    if low is None or high is None:
        return f"at least {low:.2f}" if low is not None else f"at most {high:.2f}" if high is not None else "-"
    return f"{low:.2f} to {high:.2f}"


def _unlike_shape(a: Record, b: Record) -> str | None:
    for name in ("kind", "input", "output", "n"):
        one, other = getattr(a.shape, name), getattr(b.shape, name)
        if one != other:
            return f"A is of shape {a.shape.name}, B of {b.shape.name} ({name} {one} and {other})"
    return None


def _failures(a: Record, b: Record) -> Iterator[str]:
    for word, record in (("A", a), ("B", b)):
        for failure in record.failures:
            yield f"{word} failed: {failure.point or 'every point'}: {failure.kind}: {failure.message}"


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
        if one != other and None not in (one, other):  # None: that point is missing, which is told by itself
            yield f"{name}: A {one}, B {other}"
    for word, record in (("A", a), ("B", b)):
        if record.method.short:
            yield f"{word} is a short run"
        if marked := sorted({point.name for point in record.points if point.client.short}):
            yield f"{word}'s client may have been the bottleneck at {', '.join(marked)}"


def _gpu(record: Record) -> str:
    gpu = record.machine.gpu
    return f"{gpu.count} x {gpu.name}" if gpu is not None else "none"


def _at_once(record: Record) -> int | None:
    return next((point.requests for point in record.points if point.kind == "saturation"), None)


# --- as people read it


def print_comparison(made: Comparison, out: TextIO) -> None:
    """Prints a table of ratios, the goals, and in what the runs are not alike."""
    print(f"A: {title(made.a)}, {made.a.engine.configuration.name}, run {made.a.run}", file=out)
    print(f"B: {title(made.b)}, {made.b.engine.configuration.name}, run {made.b.run}", file=out)
    for line in [*(f"not alike: {line}" for line in made.differs), *made.failures]:
        print(line, file=out)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("point", "figure", "A", "B", "B / A", "95 % interval", ""):
        table.add_column(name, justify="left" if name in ("point", "figure", "") else "right", no_wrap=True)
    for ratio in made.ratios:
        table.add_row(*_cells(ratio))
    if made.ratios:
        Console(file=out, width=WIDE, highlight=False).print(table)
    else:
        print("no figure is in both: there is nothing to compare", file=out)
    for line in [*made.goals, *made.missing]:
        print(line, file=out)
    known = sum(ratio.verdict not in (UNKNOWN, CUT) for ratio in made.ratios)
    if known > 5:
        print(f"{known} figures are compared: of so many, one in twenty would seem to differ by chance alone", file=out)


def _cells(ratio: Ratio) -> tuple[str, ...]:
    a, b = (
        f"{'≥ ' if cut else ''}{each:,.2f}" if ratio.more_is_better else f"{1e3 * each:,.1f} ms"
        for each, cut in zip((ratio.a, ratio.b), ratio.cut, strict=True)
    )
    bound = {(False, True): "≥ ", (True, False): "≤ "}.get(ratio.cut, "")
    quotient = f"{bound}{ratio.b / ratio.a:.2f}" if ratio.a > 0 and not all(ratio.cut) else "-"
    return ratio.point, ratio.figure, a, b, quotient, between(ratio.low, ratio.high), ratio.verdict
