"""The figures of a point, out of its samples: the one place that derives, for bench and for the
almanac. Words are those of docs/metrics.md. The same Parquet file gives the same record anywhere:
bootstrap and joint sample are seeded by the point's name and its data. It knows samples and the
form of a record; no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.almanac import intervals, throughput
from penstock.almanac.intervals import Ends, Floats, Ints, SeededRandom
from penstock.almanac.record import SAMPLE_ROWS, ClientHealth, Figures, Goal, Point, Sample
from penstock.almanac.samples import OK, Samples
from penstock.almanac.summaries import by_start_of, gaps_of, short, spread_of
from penstock.errors import RecordError

SAMPLE_DIGITS = 5
FEW = 100  # independent requests: below, quantiles near the end say little
SHORT_WINDOW = 30.0  # seconds of a start
FAILED_SHARE = 0.01
# Of a Poisson count of 0, 1, ... 9: the upper end of its two-sided 95 % interval (Garwood 1936).
POISSON_HIGH = (3.689, 5.572, 7.225, 8.767, 10.242, 11.668, 13.059, 14.423, 15.763, 17.085)


def point_of(
    samples: Samples,
    *,
    name: str,
    kind: Literal["saturation", "single", "open", "closed"],
    rate: float | None,
    concurrency: int | None,
    seconds: float | None,
    goals: Sequence[float],
    look: ClientHealth,
    marks: Sequence[str],
    opens: float | None = None,
    sharing: bool = False,
) -> Point:
    """Returns the point `name` of these samples (those of other points are left out).

    seconds: of the steady window, all starts together; opens: when it opened in each, counted as
    the samples' times are (None: with its first request). seconds None: no steady state (everything
    at once), from first send to last end. marks: what only the caller knows ("text prompts").
    sharing: prompts share a beginning on purpose, so that cached tokens are no surprise. Raises
    RecordError where the samples have no such point, or nothing in its window."""
    samples = in_order(samples.of(samples.point == name))
    if not samples.window.any():
        raise RecordError(f"samples have no request in the window of point {name!r}")
    if seconds is not None and not 0 < seconds < float("inf"):
        raise RecordError(
            f"a window of {seconds} s is none: give None for a point that has no steady state"
        )
    dice = SeededRandom(name, samples.intended, samples.actual, samples.first, samples.end)
    if (
        kind == "saturation"
    ):  # sent together: the order in the server's queue is a trend, not dependence
        samples = samples.of(np.lexsort((dice.below(1 << 31, (len(samples),)), samples.start)))
    window = _window(samples, seconds, opens)
    counted = samples.of(samples.window)
    complete = counted.outcome == OK
    first, worth = _first_of_all(counted), _worth(counted)
    figures = _figures(samples, counted.of(complete), window, dice)
    return Point(
        name=name,
        kind=kind,
        rate=rate,
        concurrency=concurrency,
        seconds=short(window.seconds),
        opens=short(float(window.begins[0])) if window.steady else None,
        effective=short(worth),
        requests=len(counted),
        complete=int(complete.sum()),
        outcomes=_outcomes(counted),
        output_tokens=_total(counted.output_tokens[complete]),
        prompt_tokens=_total(counted.prompt_tokens[complete]),
        cached_tokens=_total(counted.cached_tokens[complete]),
        figures=figures,
        # Not streamed: nobody knows. Nothing complete: everybody knows, all of them missed it.
        goals=_goals(first, counted.start, worth, goals, window.seconds)
        if figures.first_token or not complete.any()
        else [],
        client=look,
        marks=_marks(counted, kind, window, figures, worth, look, sharing, marks),
        sample=_sample(counted, dice),
    )


def in_order(samples: Samples) -> Samples:
    """Sorts by start, then by when they were to be issued; equal ones by what became of them,
    however they stood."""
    keys = (samples.end, samples.first, samples.actual, throughput.issued(samples), samples.start)
    return samples.of(np.lexsort(keys))


def _window(samples: Samples, seconds: float | None, opens: float | None) -> throughput.RateWindow:
    if seconds is None:
        return throughput.whole_window(samples)
    if opens is None:
        opens = max(float(np.nanmin(throughput.issued(samples)[samples.window])), 0.0)
    # What is written down is what is counted with: whoever derives again has these digits and no
    # others.
    return throughput.steady_window(samples, short(seconds), short(opens))


# --- times


def _figures(
    samples: Samples, done: Samples, window: throughput.RateWindow, dice: SeededRandom
) -> Figures:
    requests, output, total = throughput.rates_of(samples, window, dice)
    planned = throughput.issued(done)
    per_token = (done.end - done.first) / np.maximum(done.output_tokens - 1, 1)
    long = done.output_tokens >= 2
    return Figures(
        request_rate=requests,
        output_rate=output,
        total_rate=total,
        first_token=spread_of(done.first - planned, done.start, dice),
        first_token_actual=spread_of(done.first - done.actual, done.start, dice),
        inter_token=gaps_of(done, dice),
        per_token=spread_of(per_token[long], done.start[long], dice),
        end_to_end=spread_of(done.end - planned, done.start, dice),
        end_to_end_actual=spread_of(done.end - done.actual, done.start, dice),
    )


# --- goals


def _first_of_all(counted: Samples) -> Floats:
    """Returns [n] seconds to the first token from the intended start, of every request; infinite
    for a failed one."""
    first = np.where(counted.outcome == OK, counted.first - throughput.issued(counted), np.inf)
    return np.where(np.isnan(first), np.inf, np.maximum(first, 0.0))


def _worth(counted: Samples) -> float:
    first = _first_of_all(counted)
    if np.isinf(first).all():  # nothing was streamed: the ends tell how requests hang together
        first = np.where(counted.outcome == OK, counted.end - throughput.issued(counted), np.inf)
    return intervals.effective(
        [intervals.ranks(each) for each in by_start_of(first, counted.start)]
    )


def _goals(
    first: Floats, starts: Ints, worth: float, goals: Sequence[float], seconds: float
) -> list[Goal]:
    made = []
    every = [first <= goal for goal in goals]
    shares = [float(met.mean()) for met in every]
    lows, highs = intervals.share_interval(np.array(shares) * worth, worth)
    for goal, met, share, low, high in zip(goals, every, shares, lows, highs, strict=True):
        by_start = [float(met[starts == start].mean()) for start in np.unique(starts)]
        ends = intervals.across_starts(share, Ends(float(low), float(high)), by_start)
        made.append(
            Goal(
                seconds=goal,
                share=short(share),
                low=short(min(max(ends.low or 0.0, 0.0), share)),
                high=short(max(min(1.0 if ends.high is None else ends.high, 1.0), share)),
                goodput=short(float(met.sum()) / seconds) if seconds > 0 else 0.0,
            )
        )
    return made


# --- counts, marks, sample


def _outcomes(counted: Samples) -> dict[str, int]:
    names, numbers = np.unique(
        counted.outcome[counted.outcome != OK].astype(str), return_counts=True
    )
    return {str(name): int(number) for name, number in zip(names, numbers, strict=True)}


def _total(tokens: Ints) -> int:
    return int(tokens[tokens > 0].astype(np.int64).sum())


def _marks(
    counted: Samples,
    kind: str,
    window: throughput.RateWindow,
    figures: Figures,
    worth: float,
    look: ClientHealth,
    sharing: bool,
    given: Sequence[str],
) -> list[str]:
    """Returns why to read the point with care; docs/metrics.md has them all."""
    failed = counted.outcome != OK
    begun = (counted.outcome == "unfinished") & ~np.isnan(counted.first)
    each, longest = (
        window.seconds / len(window.starts),
        figures.end_to_end.p95.value if figures.end_to_end else 0.0,
    )
    found = {
        "few requests": worth < FEW,
        "cached prompts": not sharing and bool((counted.cached_tokens > 0).any()),
        "usage disagreed": bool(np.isin(counted.outcome.astype(str), ("usage", "length")).any()),
        "failed requests": float(failed.mean()) > FAILED_SHARE,
        "cut off after the first token": float(begun.mean()) > FAILED_SHARE,
        "short window": each < SHORT_WINDOW or (window.steady and each < 2 * longest),
        "client short": look.short,
        "intended start unknown": kind == "open" and bool(np.isnan(counted.intended).any()),
    }
    return list(dict.fromkeys([*given, *(mark for mark, holds in found.items() if holds)]))


def _sample(counted: Samples, dice: SeededRandom) -> Sample:
    """Draws one request out of each of 500 stretches of equal length, in order of issue."""
    total = len(counted)
    keep = np.arange(total)
    if total > SAMPLE_ROWS:
        edges = np.arange(SAMPLE_ROWS + 1) * total // SAMPLE_ROWS
        inside = dice.below(1 << 30, (SAMPLE_ROWS,)) * np.diff(edges) >> 30
        keep = edges[:-1] + inside
    rows = counted.of(keep)
    ok, planned = rows.outcome == OK, throughput.issued(rows)
    per_token = (rows.end - rows.first) / np.maximum(rows.output_tokens - 1, 1)
    return Sample(
        first=_column(rows.first - planned, ok),
        per_token=_column(per_token, ok & (rows.output_tokens >= 2)),
        end_to_end=_column(rows.end - planned, ok),
    )


def _column(values: Floats, holds: np.typing.NDArray[np.bool_]) -> list[float]:
    known = holds & ~np.isnan(values)
    return [
        short(max(float(v), 0.0), SAMPLE_DIGITS) if k else -1.0
        for v, k in zip(values, known, strict=True)
    ]


# --- what follows from figures; the page has the same in its own language (40_answer.js)


@dataclass(frozen=True, slots=True)
class Sustained:
    """What an open point says of rates, in requests a second. offered: what its window issued.
    rate: what the point stands for where it keeps a goal; 0: nothing was served in it, so that it
    can only miss one, at what was offered. low: what it stands for surely (95 %); None: too few
    requests to say."""

    offered: float
    rate: float
    low: float | None


def sustained(point: Point) -> Sustained:
    """Returns what an open point says of rates, whatever the goal; who shows or ranks a point's
    rate takes it from here.

    Offered is what the window issued over its seconds: the plan's rate is in the point's name
    alone, and where a count was left to chance that moves it by 10 % at 100 requests. (An import
    has no steady window, its seconds hold the tail: the plan's.) The point stands for what was
    offered; where significantly less was completed, for what was completed. Where too few ended in
    the window for an interval, it was not served if Poisson's interval of their number says so, or
    if one was cut off by the point's end. Raises ValueError for a point of another kind."""
    if point.kind != "open" or point.rate is None:
        raise ValueError(f"point {point.name} is {point.kind}: only an open loop offers a rate")
    steady = point.opens is not None and point.seconds > 0
    offered = short(point.requests / point.seconds) if steady else point.rate
    done = point.figures.request_rate
    if done is None:
        return Sustained(offered, 0.0, None)
    if done.high is not None:
        less = done.high < offered
    else:
        ended = round(done.value * point.seconds)
        few = ended < len(POISSON_HIGH) and POISSON_HIGH[ended] < offered * point.seconds
        less = few or point.outcomes.get("unfinished", 0) > 0
    return Sustained(
        offered,
        min(offered, done.value) if less else offered,
        None if done.low is None else min(offered, done.low),
    )


def most_of(points: Iterable[Point]) -> float | None:
    """Returns the most requests a second that a run's engine can be said to sustain: the high end
    of everything at once. Of few requests "not significantly less than was offered" is no evidence
    of having served it, and no engine sustains more than comes out when all requests are there from
    the start.

    None: nobody knows. Everything at once was not measured, was cut off by its time limit, its
    client was short, or it has no interval; or another point surely completed more, so that
    everything at once says nothing of the highest."""
    rates = [(point, point.figures.request_rate) for point in points if not point.client.short]
    ends = [
        rate.high
        for point, rate in rates
        if point.kind == "saturation" and point.complete and not point.outcomes.get("unfinished")
        if rate is not None and rate.high is not None
    ]
    most = max(ends, default=None)
    if most is None or any(rate is not None and (rate.low or 0.0) > most for _, rate in rates):
        return None
    return most


@dataclass(frozen=True, slots=True)
class Kept:
    """The rates up to which a goal is kept, in requests a second. rate: the highest one kept; None:
    none. low: the highest one that is surely kept (95 %). missed: what was offered at the first
    point beyond that misses it; None: there is no such point. high: what was offered at the first
    beyond that surely misses it; None: there is no such point."""

    rate: float | None
    low: float | None
    missed: float | None
    high: float | None


def kept_of(
    line: Iterable[tuple[Sustained, Goal]], quantile: float, most: float | None = None
) -> Kept:
    """Returns the rates up to which open points keep a goal. line: what each point says of rates,
    and of the goal; points whose client was short the caller leaves out. most: what no rate is told
    above (`most_of` their run); None: there is no such bound.

    Shares fall as rates rise, so from the slowest offered rate that keeps the goal on the first
    that misses it holds, whatever chance lets a faster one do. Past its highest rate an engine
    completes less of what it is offered, so the highest rate kept need not be that of the fastest
    point that keeps it."""
    ordered = sorted(line, key=lambda each: each[0].offered)
    ordered = [each for each in ordered if not shows_nothing(*each, quantile)]
    keeps = [goal.share >= quantile for _, goal in ordered]
    slowest = keeps.index(True) if True in keeps else len(keeps)
    fails = keeps.index(False, slowest) if False in keeps[slowest:] else len(keeps)
    before = ordered[slowest:fails]
    after = ordered[fails:] if before else ordered
    missed = [here.offered for here, goal in after if goal.share < quantile]
    misses = [here.offered for here, goal in after if goal.high < quantile]
    if not before:
        return Kept(None, None, missed[0] if missed else None, misses[0] if misses else None)
    bound = float("inf") if most is None else most
    rate = min(max(here.rate for here, _ in before), bound)
    surely = [here.low for here, goal in before if goal.low >= quantile and here.low is not None]
    return Kept(
        rate,
        min(max(surely), rate) if surely else None,
        missed[0] if missed else None,
        misses[0] if misses else None,
    )


def shows_nothing(here: Sustained, goal: Goal, quantile: float) -> bool:
    """Returns whether a point says neither that a goal is kept nor that it is missed: nothing was
    served in its window, though first tokens came in time."""
    return here.rate <= 0 and goal.share >= quantile
