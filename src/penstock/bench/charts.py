"""The report's pictures as inline SVG, in the page's own classes, so that they follow light and dark.

    latency   rate against the first token: p50 and p95 of each open point with their intervals, goals as lines
    shares    of each point: which share of requests had their first token by then

It knows a record's points; no page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from penstock.almanac.record import Interval, Point
from penstock.bench.slo_crossing import in_three, offered

WIDTH, HEIGHT = 760, 340  # of the SVG's own coordinates; it scales with the page
LEFT, RIGHT, TOP, BOTTOM = 80, 150, 16, 44
COLOURS = 6  # classes c0 up
STEPS = (1, 2, 5)

Place = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Axis:
    """low, high: the ends; ticks within them. place: a value to a coordinate."""

    ticks: list[float]
    place: Place


def latency(points: Sequence[Point], goals: Sequence[float]) -> str:
    """Empty where no open point has a first token."""
    opened = sorted((point for point in points if point.kind == "open" and point.figures.first_token), key=offered)
    if not opened:
        return ""
    spreads = [point.figures.first_token for point in opened if point.figures.first_token]
    values = [end for spread in spreads for each in (spread.p50, spread.p95) for end in _ends(each) if end > 0]
    x = _linear(0, max(map(offered, opened)) * 1.05, LEFT, WIDTH - RIGHT)
    y = _logarithmic(min([*values, *goals]) / 1.3, max([*values, *goals]) * 1.3, HEIGHT - BOTTOM, TOP)
    parts = [_frame(x, y, "offered requests a second", "first token")]
    for goal in goals:
        parts.append(
            f'<line class="goal" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y.place(goal):.1f}" y2="{y.place(goal):.1f}"/>'
            f'<text class="tick" x="{WIDTH - RIGHT + 8}" y="{y.place(goal) + 4:.1f}">goal {seconds(goal)}</text>'
        )
    rates = [offered(point) for point in opened]
    for number, name in enumerate(("p50", "p95")):
        series: list[Interval] = [getattr(spread, name) for spread in spreads]
        parts.append(_bars(rates, series, number, x, y))
        parts.append(_line(rates, [max(each.value, 1e-6) for each in series], number, x, y, name))
    parts.append(_legend(["p50", "p95"]))
    return _svg("First token against the offered rate", parts)


def shares(points: Sequence[Point], most: int = COLOURS) -> str:
    """Of the joint samples; of many points those that are spread over them."""
    drawn = [point for point in points if any(first >= 0 for first in point.sample.first)]
    drawn = [drawn[at * len(drawn) // most] for at in range(most)] if len(drawn) > most else drawn
    if not drawn:
        return ""
    times = [sorted(max(first, 1e-4) for first in point.sample.first if first >= 0) for point in drawn]
    low, high = min(each[0] for each in times), max(each[-1] for each in times)
    x = _logarithmic(low / 1.2, high * 1.2, LEFT, WIDTH - RIGHT)
    y = Axis([0, 0.25, 0.5, 0.75, 1], lambda share: TOP + (1 - share) * (HEIGHT - TOP - BOTTOM))
    parts = [_frame(x, y, "first token within", "share of requests")]
    for number, (point, each) in enumerate(zip(drawn, times, strict=True)):
        rows = len(point.sample.first)  # failed ones too: the curve ends below 1
        steps = [(value, (at + 1) / rows) for at, value in enumerate(each)]
        path = " ".join(f"{x.place(value):.1f},{y.place(share):.1f}" for value, share in steps)
        parts.append(
            f'<polyline class="curve c{number}" points="{path}"><title>{escape(point.name)}</title></polyline>'
        )
    parts.append(_legend([point.name for point in drawn]))
    return _svg("Share of requests with their first token by then", parts)


def seconds(value: float) -> str:
    return f"{1e3 * value:g} ms" if value < 1 else f"{value:g} s"


# --- parts


def _ends(value: Interval) -> tuple[float, ...]:
    return tuple(each for each in (value.low, value.value, value.high) if each is not None)


def _svg(label: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _frame(x: Axis, y: Axis, below: str, beside: str) -> str:
    share = y.ticks == [0, 0.25, 0.5, 0.75, 1]
    grid = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y.place(tick):.1f}" y2="{y.place(tick):.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{y.place(tick) + 4:.1f}" text-anchor="end">'
        f"{f'{tick:.0%}' if share else seconds(tick)}</text>"
        for tick in y.ticks
    )
    marks = "".join(
        f'<text class="tick" x="{x.place(tick):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">'
        f"{seconds(tick) if share else f'{tick:g}'}</text>"
        for tick in x.ticks
    )
    middle = (LEFT + WIDTH - RIGHT) / 2
    names = (
        f'<text class="tick" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{below}</text>'
        f'<text class="tick" transform="rotate(-90 14 {HEIGHT / 2})" x="14" y="{HEIGHT / 2}" '
        f'text-anchor="middle">{beside}</text>'
    )
    return grid + marks + names


def _bars(rates: Sequence[float], series: Sequence[Interval], number: int, x: Axis, y: Axis) -> str:
    """The intervals, where they are known."""
    return "".join(
        f'<line class="bar c{number}" x1="{x.place(rate):.1f}" x2="{x.place(rate):.1f}" '
        f'y1="{y.place(max(each.low, 1e-6)):.1f}" y2="{y.place(max(each.high, 1e-6)):.1f}"/>'
        for rate, each in zip(rates, series, strict=True)
        if each.low is not None and each.high is not None
    )


def _line(rates: Sequence[float], values: Sequence[float], number: int, x: Axis, y: Axis, name: str) -> str:
    path = " ".join(f"{x.place(rate):.1f},{y.place(value):.1f}" for rate, value in zip(rates, values, strict=True))
    dots = "".join(
        f'<circle class="dot c{number}" cx="{x.place(rate):.1f}" cy="{y.place(value):.1f}" r="4">'
        f"<title>{name} {seconds(float(f'{value:.3g}'))} at {in_three(rate)} a second</title></circle>"
        for rate, value in zip(rates, values, strict=True)
    )
    return f'<polyline class="curve c{number}" points="{path}"/>{dots}'


def _legend(names: Sequence[str]) -> str:
    left, top = WIDTH - RIGHT + 8, HEIGHT - BOTTOM - 18 * len(names)
    return "".join(
        f'<circle class="dot c{number}" cx="{left + 5}" cy="{top + 18 * number}" r="5"/>'
        f'<text class="tick" x="{left + 16}" y="{top + 18 * number + 4}">{escape(name)}</text>'
        for number, name in enumerate(names)
    )


def _linear(low: float, high: float, begin: float, end: float) -> Axis:
    step = next(step for step in _steps(high - low) if (high - low) / step <= 7)
    ticks = [float(f"{step * at:.6g}") for at in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return Axis(ticks, lambda value: begin + (value - low) / (high - low) * (end - begin))


def _logarithmic(low: float, high: float, begin: float, end: float) -> Axis:
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [float(f"{step}e{exponent}") for exponent in exponents for step in STEPS]
    ticks = [tick for tick in every if low <= tick <= high]
    if len(ticks) > 7:
        ticks = [tick for tick in ticks if f"{tick:e}".startswith("1")]
    span = math.log(high / low)
    return Axis(ticks, lambda value: begin + math.log(value / low) / span * (end - begin))


def _steps(span: float) -> list[float]:
    exponent = math.floor(math.log10(span)) - 1
    return [float(f"{step}e{exponent + more}") for more in range(3) for step in STEPS]
