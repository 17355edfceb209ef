"""Whether a series of sizes grows, is flat, or has not settled: a robust slope over its later half, with an interval.

What a process keeps for ever is a slope that stays. What its allocator has not given back looks like one at first: its
pools fill up to the most that was ever in use at once, a record that is broken ever more rarely (about as the logarithm
of time), so the slope falls. So the first half is warm-up, and what is judged is the second. The slope is Theil's and
Sen's (the median of all pairs' slopes; P. K. Sen, JASA 63, 1968), its interval Sen's, by the variance of Kendall's S:
no outlier moves either. It takes points to be independent, and seconds of a process's memory are not: the points are
medians over windows that are long beside its ups and downs. Numbers alone; it knows no process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOWS = 12
SHORTEST_WINDOW = 60.0  # seconds; the soak's requests live for some
SHORTEST = 2 * WINDOWS * SHORTEST_WINDOW  # seconds of a run that can be judged
FLAT, GROWS, UNSETTLED = "flat", "grows", "has not settled"
_SURE = 2.58  # standard deviations: 99 %

Series = Sequence[tuple[float, float]]  # (seconds, size)


@dataclass(frozen=True)
class Trend:
    """Sizes an hour: the slope, and the interval that it lies in with 99 % probability."""

    slope: float
    low: float
    high: float


def verdict(series: Series, most: float) -> str:
    """`flat` and `grows` where the whole interval is on one side of `most` an hour; but what rises at less than half
    the pace of its warm-up is still on its way, and a longer run tells."""
    before, now = early(series), late(series)
    if now.high <= most:
        return FLAT
    return GROWS if now.low > most and now.slope > before.slope / 2 else UNSETTLED


def early(series: Series) -> Trend:
    """Of the second to the fifth tenth: what the warm-up came to."""
    return _trend(_between(series, 0.1, 0.5))


def late(series: Series) -> Trend:
    """Of the second half: what a run is judged by."""
    return _trend(_between(series, 0.5, 1.0))


def long_enough(series: Series) -> bool:
    return bool(series) and series[-1][0] - series[0][0] >= SHORTEST


def rise(series: Series) -> float:
    """From the median of the second tenth to that of the last: all that a short run can say."""
    first, last = _between(series, 0.1, 0.2), _between(series, 0.9, 1.0)
    return float(np.median(last[:, 1]) - np.median(first[:, 1]))


def _between(series: Series, begin: float, end: float) -> NDArray[np.float64]:
    """The points of a part of the time, `begin` and `end` being shares of it: [points, 2]."""
    every = np.asarray(series, np.float64)
    start, length = every[0, 0], every[-1, 0] - every[0, 0]
    part = every[(every[:, 0] >= start + begin * length) & (every[:, 0] <= start + end * length)]
    return part if len(part) else every[-1:]


def _trend(points: NDArray[np.float64]) -> Trend:
    at, size = _medians(points)
    one, other = np.triu_indices(len(at), 1)
    slopes = np.sort((size[other] - size[one]) / (at[other] - at[one])) * 3600
    if not slopes.size:
        return Trend(0.0, -math.inf, math.inf)
    n = len(at)
    spread = _SURE * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low, high = int((slopes.size - spread) / 2), math.ceil((slopes.size + spread) / 2)
    if low < 0 or high >= slopes.size:
        return Trend(float(np.median(slopes)), -math.inf, math.inf)
    return Trend(float(np.median(slopes)), float(slopes[low]), float(slopes[high]))


def _medians(points: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Middle times and median sizes of equal windows; empty ones are left out."""
    start, length = points[0, 0], points[-1, 0] - points[0, 0]
    window = np.minimum((points[:, 0] - start) / max(length, 1e-9) * WINDOWS, WINDOWS - 1).astype(int)
    parts = [points[window == number] for number in range(WINDOWS)]
    kept = [part for part in parts if len(part)]
    return np.array([part[:, 0].mean() for part in kept]), np.array([np.median(part[:, 1]) for part in kept])
