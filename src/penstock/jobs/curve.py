"""Draws the coverage curve (pass@k over k). It is inline SVG in the report, and a PNG for other
uses. Knows points, not samples.

Both have k on a log2 scale, the share of problems solved from 0 to 100 %, and the 95 % interval as
a band, with a line at each point, because a single point has no band.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from math import ceil, log2, log10
from typing import Any

from penstock.status_line import percent

WIDTH, HEIGHT = 760, 380  # size in the SVG's coordinates, which scale with the page
LEFT, RIGHT, TOP, BOTTOM = 56, 78, 18, 46
Point = dict[str, Any]  # keys: k, value, and low and high of its interval


def interval(point: Point) -> str:
    """Returns text such as `57.3 % to 68.0 %`, with enough digits to tell its ends apart."""
    digits = max(1, ceil(-log10(point["high"] - point["low"])) - 1)
    return f"{percent(point['low'], digits)} to {percent(point['high'], digits)}"


def svg(points: Sequence[Point]) -> str:
    """Returns the curve as an <svg> element. Its colours are CSS classes of the page, for light and
    dark themes."""
    x = _scale(points)

    def y(share: float) -> float:
        return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)

    grid = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(s):.1f}"'
        f' y2="{y(s):.1f}"/><text class="tick" x="{LEFT - 10}" y="{y(s) + 4:.1f}"'
        f' text-anchor="end">{percent(s, 0)}</text>'
        for s in (0, 0.25, 0.5, 0.75, 1)
    )
    ticks = "".join(
        f'<text class="tick" x="{x(p["k"]):.1f}" y="{HEIGHT - BOTTOM + 20}"'
        f' text-anchor="middle">{p["k"]:,}</text>'
        for p in _labelled(points)
    )
    band = " ".join(
        [f"{x(p['k']):.1f},{y(p['high']):.1f}" for p in points]
        + [f"{x(p['k']):.1f},{y(p['low']):.1f}" for p in reversed(points)]
    )
    spans = "".join(
        f'<line class="span" x1="{x(p["k"]):.1f}" x2="{x(p["k"]):.1f}" y1="{y(p["high"]):.1f}"'
        f' y2="{y(p["low"]):.1f}"/>'
        for p in points
    )
    line = " ".join(f"{x(p['k']):.1f},{y(p['value']):.1f}" for p in points)
    dots = "".join(
        f'<circle class="dot" cx="{x(p["k"]):.1f}" cy="{y(p["value"]):.1f}"'
        f' r="4.5"><title>pass@{p["k"]}: '
        f"{percent(p['value'])} ({interval(p)})</title></circle>"
        for p in points
    )
    ends = "".join(
        f'<text class="value" x="{x(p["k"]) + 9:.1f}"'
        f' y="{y(p["value"]) + dy:.1f}">{percent(p["value"])}</text>'
        for p, dy in _ends(points)
    )
    axis = (
        f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}"'
        ' text-anchor="middle">samples (k)</text>'
    )
    first, last = (percent(point["value"]) for point in (points[0], points[-1]))
    label = f"Coverage from {first} at one sample to {last} at {points[-1]['k']}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{label}">{grid}{ticks}{axis}<polygon class="band"'
        f' points="{band}"/>{spans}<polyline class="curve" points="{line}"/>{dots}{ends}</svg>'
    )


def _scale(points: Sequence[Point]) -> Any:
    doublings = max(log2(points[-1]["k"]), 1.0)
    return lambda k: LEFT + log2(k) / doublings * (WIDTH - LEFT - RIGHT)


def _labelled(points: Sequence[Point]) -> list[Point]:
    """Returns the points to label: at most a dozen, and none so close to the last that labels would
    touch."""
    step = -(-len(points) // 12)
    *rest, last = points
    room = log2(last["k"]) / 14
    return [p for p in rest[::step] if log2(last["k"] / p["k"]) > room] + [last]


def _ends(points: Sequence[Point]) -> list[tuple[Point, int]]:
    """Returns the first and the last point, whose values are shown, each with its label's vertical
    offset. The first point's label is below the curve."""
    return [(points[-1], 4)] if len(points) == 1 else [(points[0], 18), (points[-1], 4)]


def png(points: Sequence[Point], title: str) -> bytes:
    """Returns the same curve drawn by matplotlib, 1,200 x 750 pixels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = figure.subplots()
    ks, low, high = ([p[name] for p in points] for name in ("k", "low", "high"))
    axes.fill_between(ks, low, high, color="#0b6e99", alpha=0.16, lw=0)
    axes.vlines(ks, low, high, color="#0b6e99", alpha=0.4, lw=1.5)
    axes.plot(ks, [p["value"] for p in points], color="#0b6e99", marker="o", lw=2, ms=5)
    axes.set_xscale("log", base=2)
    labelled = [p["k"] for p in _labelled(points)]
    axes.set_xticks(labelled, [f"{k:,}" for k in labelled])
    axes.minorticks_off()
    axes.set_ylim(0, 1.02)
    axes.set_yticks(
        [0, 0.25, 0.5, 0.75, 1], [percent(share, 0) for share in (0, 0.25, 0.5, 0.75, 1)]
    )
    axes.set_xlabel("samples (k)")
    axes.set_ylabel("coverage (pass@k), 95 % interval")
    axes.grid(axis="y", color="#d8dee4", lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    for point, dy in _ends(points):
        place, side = ((0, 9), "right") if dy < 10 else ((8, -14), "left")
        text, at = percent(point["value"]), (point["k"], point["value"])
        axes.annotate(text, at, textcoords="offset points", xytext=place, ha=side, fontsize=9)
    axes.set_title(title, loc="left", fontsize=11)
    picture = BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
