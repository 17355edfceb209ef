"""Two measured runs against each other: ratios of their figures, each with its 95 % interval.

The interval of a ratio comes of the two figures' own, which need not be symmetric (MOVER: Donner and Zou, 2012, on the
logarithms). One that contains 1 is "no significant difference". Of a goal's crossing each run knows two rates, one that
surely keeps it and one that surely doesn't; the ratio lies between the nearest and the farthest of them. It knows
records alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.almanac.reading import read_record
from penstock.almanac.record import Interval, Point, Record
from penstock.bench.crossings import crossings
from penstock.errors import UsageError

SAME = "no significant difference"
UNKNOWN = "too few requests to say"
CLIENT_SHORT = "not ranked: the client may have been the bottleneck"
RECORD = "record.json"
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
    of one of them was."""

    point: str
    figure: str
    a: float
    b: float
    low: float | None
    high: float | None
    more_is_better: bool
    short: bool = False

    @property
    def verdict(self) -> str:
        if self.short:
            return CLIENT_SHORT
        if self.low is None or self.high is None:
            return UNKNOWN
        if self.low <= 1 <= self.high:
            return SAME
        return "B is better" if (self.low > 1) == self.more_is_better else "A is better"


@dataclass(frozen=True, slots=True)
class Comparison:
    """differs: in what the runs are not alike beside the engine. missing: points that only one of them has."""

    a: Record
    b: Record
    ratios: list[Ratio]
    goals: list[str]
    differs: list[str]
    missing: list[str]


def record_at(path: Path) -> Record:
    """Of a record's file, a shape's folder, or a run's with one shape. Raises UsageError and RecordError."""
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
    return Comparison(a, b, ratios, list(_goals(a, b)), list(_differs(a, b)), missing)


def ratio_ends(a: Interval, b: Interval) -> tuple[float | None, float | None]:
    """The 95 % interval of b over a; None: one of the two has none."""
    if a.low is None or a.high is None or b.low is None or b.high is None or a.value <= 0 or b.value <= 0:
        return None, None
    middle = math.log(b.value / a.value)
    below = math.hypot(_apart(b.low, b.value), _apart(a.value, a.high))
    above = math.hypot(_apart(b.value, b.high), _apart(a.low, a.value))
    return math.exp(middle - below), math.exp(middle + above) if above < 700 else math.inf


def _apart(low: float, high: float) -> float:
    """Between two logarithms; the lower one of 0 lies without end below."""
    return math.log(high / low) if low > 0 else math.inf


def _ratios(one: Point, other: Point) -> Iterator[Ratio]:
    for words, figure, quantile in COMPARED[one.kind]:
        a, b = _interval(one, figure, quantile), _interval(other, figure, quantile)
        if a is not None and b is not None:
            low, high = ratio_ends(a, b)
            short = one.client.short or other.client.short
            yield Ratio(one.name, words, a.value, b.value, low, high, quantile is None, short)


def _interval(point: Point, figure: str, quantile: str | None) -> Interval | None:
    found = getattr(point.figures, figure)
    value: Interval | None = found if quantile is None or found is None else getattr(found, quantile)
    return value


def _goals(a: Record, b: Record) -> Iterator[str]:
    """The rates up to which first tokens come in time, and between what their ratio lies: by rates whose shares are
    surely above and below the quantile, as on the almanac's page."""
    theirs = {crossing.seconds: crossing for crossing in crossings(b)}
    for one in crossings(a):
        other = theirs.get(one.seconds)
        if other is None:
            continue
        words = f"first token within {one.seconds:g} s"
        if one.meets is None or other.meets is None:
            none = " and ".join(name for name, each in (("A", one), ("B", other)) if each.meets is None)
            yield f"{words}: {none} met it at no rate that was tried"
            continue
        told = f"{words}: A up to {one.meets:.3g} requests a second, B up to {other.meets:.3g}"
        least = other.keeps / one.misses if other.keeps and one.misses else None
        most = other.misses / one.keeps if other.misses and one.keeps else None
        yield f"{told}; B / A {_between(least, most)}"


def _between(least: float | None, most: float | None) -> str:
    """What is sure of a ratio; None: nothing on that side."""
    if least is not None and least > 1:
        return f"at least {least:.2f}" if most is None else f"{least:.2f} to {most:.2f}"
    if most is not None and most < 1:
        return f"at most {most:.2f}" if least is None else f"{least:.2f} to {most:.2f}"
    if least is None or most is None:
        return UNKNOWN
    return f"{least:.2f} to {most:.2f}: {SAME}"


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
        if one != other:
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
