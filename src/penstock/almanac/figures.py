"""Derives a load level's figures from its samples. A point is one load level of a run: everything
at once, a request rate, or a number of concurrent requests. Bench and almanac both derive figures
here, and nowhere else. Terms are those of docs/metrics.md. The same Parquet file gives the same
record anywhere: the random numbers are seeded by the load level's name and its data. Knows samples
and the format of a benchmark record; no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from penstock.almanac import intervals, throughput
from penstock.almanac.board_power import Reading, board_of
from penstock.almanac.intervals import Ends, Floats, Ints, SeededRandom
from penstock.almanac.machine_spread import apart
from penstock.almanac.record import (
    SAMPLE_ROWS,
    ClientHealth,
    Edition,
    Figures,
    Goal,
    Point,
    Sample,
)
from penstock.almanac.samples import OK, Samples
from penstock.almanac.summaries import by_start_of, gaps_of, short, spread_of
from penstock.errors import RecordError

SAMPLE_DIGITS = 5
FEW = 100  # least number of independent requests; below it extreme quantiles (p99) say little
SHORT_WINDOW = 30.0  # a window of fewer seconds per server start is marked short
FAILED_SHARE = 0.01
# Upper ends of the two-sided 95 % interval of Poisson counts 0 to 9 (Garwood 1936).
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
    edition: Edition | None = None,
    board: Sequence[Reading] = (),
    accepted_drafts: float | None = None,
) -> Point:
    """Derives the load level `name`; samples of other load levels are ignored.

    seconds: length of the steady window, all starts together; None: no steady state (everything at
        once), so the window runs from the first send to the last end.
    opens: when the window opened in each start, on the samples' clock; None: with its first
    request. marks: marks that only the caller knows ("text prompts"). sharing: prompts share a
    beginning on purpose, so cached tokens are expected. edition: the edition's term, whose method
    takes the place of what differs between starts: two of them say little. board: readings of power
    of all load levels. accepted_drafts: as the engine counted them.

    Raises RecordError when the samples have no such load level, or no request in its window.
    """
    samples = in_order(samples.of(samples.point == name))
    if not samples.window.any():
        raise RecordError(f"samples have no request in the window of point {name!r}")
    if seconds is not None and not 0 < seconds < float("inf"):
        raise RecordError(
            f"a window of {seconds} s is none: give None for a point that has no steady state"
        )
    dice = SeededRandom(name, samples.intended, samples.actual, samples.first, samples.end)
    # Requests were sent together, so later ones wait longer. This trend is no dependence between
    # requests; shuffling removes it.
    if kind == "saturation":
        samples = samples.of(np.lexsort((dice.below(1 << 31, (len(samples),)), samples.start)))
    window = replace(_window(samples, seconds, opens), between=edition is None)
    counted = samples.of(samples.window)
    complete = counted.outcome == OK
    first, worth = _first_of_all(counted), _worth(counted)
    figures = _figures(samples, counted.of(complete), window, dice)
    power = board_of([each for each in board if each.point == name], window, figures.output_rate)
    away = apart(edition, power.busy if power else None)
    differ = ["starts differ"] if _differ(samples, window, away) else []
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
        # Without streaming it is unknown whether latency goals were met. If no request was
        # complete, every request missed every goal.
        goals=_goals(first, counted.start, worth, goals, window)
        if figures.first_token or not complete.any()
        else [],
        client=look,
        board=power,
        accepted_drafts=accepted_drafts,
        marks=_marks(counted, kind, window, figures, worth, look, sharing, [*marks, *differ]),
        sample=_sample(counted, dice),
    )


def in_order(samples: Samples) -> Samples:
    """Sorts by start, then by intended start; ties by the requests' times, so that the order in the
    file does not matter."""
    keys = (samples.end, samples.first, samples.actual, throughput.issued(samples), samples.start)
    return samples.of(np.lexsort(keys))


def _window(samples: Samples, seconds: float | None, opens: float | None) -> throughput.RateWindow:
    if seconds is None:
        return throughput.whole_window(samples)
    if opens is None:
        opens = max(float(np.nanmin(throughput.issued(samples)[samples.window])), 0.0)
    # Round the window's seconds first: a later derivation from the record has only the rounded
    # digits.
    return throughput.steady_window(samples, short(seconds), short(opens))


# --- rates and latencies


def _figures(
    samples: Samples, done: Samples, window: throughput.RateWindow, dice: SeededRandom
) -> Figures:
    requests, output, total = throughput.rates_of(samples, window, dice)
    planned = throughput.issued(done)
    per_token = (done.end - done.first) / np.maximum(done.output_tokens - 1, 1)
    long = done.output_tokens >= 2
    spread = partial(spread_of, dice=dice, between=window.between)
    return Figures(
        request_rate=requests,
        output_rate=output,
        total_rate=total,
        first_token=spread(done.first - planned, done.start),
        first_token_actual=spread(done.first - done.actual, done.start),
        inter_token=gaps_of(done, dice, window.between),
        per_token=spread(per_token[long], done.start[long]),
        end_to_end=spread(done.end - planned, done.start),
        end_to_end_actual=spread(done.end - done.actual, done.start),
    )


# --- latency goals: the share of requests that met each


def _first_of_all(counted: Samples) -> Floats:
    """Returns the seconds from the intended start to the first token of every request, float64 [n];
    infinite for a failed request."""
    first = np.where(counted.outcome == OK, counted.first - throughput.issued(counted), np.inf)
    return np.where(np.isnan(first), np.inf, np.maximum(first, 0.0))


def _worth(counted: Samples) -> float:
    first = _first_of_all(counted)
    # nothing was streamed: measure the requests' dependence by their end times
    if np.isinf(first).all():
        first = np.where(counted.outcome == OK, counted.end - throughput.issued(counted), np.inf)
    return intervals.effective(
        [intervals.ranks(each) for each in by_start_of(first, counted.start)]
    )


def _goals(
    first: Floats,
    starts: Ints,
    worth: float,
    goals: Sequence[float],
    window: throughput.RateWindow,
) -> list[Goal]:
    made = []
    every = [first <= goal for goal in goals]
    shares = [float(met.mean()) for met in every]
    lows, highs = intervals.share_interval(np.array(shares) * worth, worth)
    for goal, met, share, low, high in zip(goals, every, shares, lows, highs, strict=True):
        by_start = [float(met[starts == start].mean()) for start in np.unique(starts)]
        by_start = by_start if window.between else []
        ends = intervals.across_starts(share, Ends(float(low), float(high)), by_start)
        made.append(
            Goal(
                seconds=goal,
                share=short(share),
                low=short(min(max(ends.low or 0.0, 0.0), share)),
                high=short(max(min(1.0 if ends.high is None else ends.high, 1.0), share)),
                goodput=short(float(met.sum()) / window.seconds) if window.seconds > 0 else 0.0,
            )
        )
    return made


# --- counts, marks of doubtful results, and the stored sample of requests


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
    """Returns the reasons to read the load level with care; docs/metrics.md lists them all."""
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


def _differ(samples: Samples, window: throughput.RateWindow, away: float) -> bool:
    """Returns True if the output rates of the edition's starts differ by more than those of two
    machines should."""
    rates = throughput.start_rates(samples, window) if away else []
    return len(rates) > 1 and max(rates) > min(rates) * math.exp(2**0.5 * away)


def _sample(counted: Samples, dice: SeededRandom) -> Sample:
    """Returns a subset of the requests for the record: one drawn from each of 500 equal stretches,
    in the order in which they were sent."""
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


# --- rates derived from figures; the web page derives the same in JavaScript (40_answer.js)


@dataclass(frozen=True, slots=True)
class Sustained:
    """The rates of an open-loop load level, in requests a second. offered: requests sent in its
    window, per second. rate: the rate that the engine is credited with if the load level meets a
    latency goal; 0: nothing was served, so it can only miss latency goals. low: the lower end of
    the 95 % interval of `rate`; None: too few requests to say.
    """

    offered: float
    rate: float
    low: float | None


def sustained(point: Point) -> Sustained:
    """Returns the rates of an open-loop load level, the same for every latency goal. All code that
    shows or ranks a load level's rate calls this function.

    The offered rate is the number of requests sent in the window over its seconds. (The planned
    rate is only the load level's name; a random count differs from it by 10 % at 100 requests. An
    imported run has no steady window, and its seconds include the time until the last request
    ended, so there the planned rate is used.) `rate` is the offered rate, or the completed rate
    where that is significantly lower. If too few requests ended in the window for an interval, the
    rate counts as not served if the Poisson interval of their number excludes the offered rate, or
    if a request was cut off by the load level's end. Raises ValueError for a load level of another
    kind.
    """
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
    """Returns an upper bound of the rate that a run's engine can sustain, in requests a second: the
    high end of the saturation load level (everything at once). The bound is needed because for few
    requests "not significantly less than offered" is weak evidence, and no engine sustains more
    than it completes when all requests wait from the start.

    None: unknown. The saturation load level was not measured, was cut off by its time limit, had a
    short client or has no interval; or another load level surely completed more.
    """
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
    """The rates up to which a latency goal is met, in requests a second. rate: the highest rate
    that meets it; None: no rate does. low: the highest rate that meets it with 95 % confidence.
    missed: the offered rate of the next faster load level, which misses the latency goal; None:
    there is none. high: the offered rate of the first load level that misses it with 95 %
    confidence.
    """

    rate: float | None
    low: float | None
    missed: float | None
    high: float | None


def kept_of(
    line: Iterable[tuple[Sustained, Goal]], quantile: float, most: float | None = None
) -> Kept:
    """Returns the rates up to which open-loop load levels meet a latency goal. line: each load
    level's rates and the share of its requests that met the goal; the caller leaves out load levels
    whose client was short. most: an upper bound of all rates (`most_of` the run); None: no bound.

    The share of requests in time falls as rates rise. So the search starts at the slowest rate that
    meets the goal and ends at the next rate that misses it, even if a faster load level meets it by
    chance. An overloaded engine completes less than it is offered, so the highest completed rate
    need not belong to the fastest load level.
    """
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
    """Returns True if a load level shows neither that a latency goal is met nor that it is missed:
    no request ended in its window, though first tokens came in time."""
    return here.rate <= 0 and goal.share >= quantile
