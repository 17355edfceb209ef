"""Rates of a load level. A rate counts the requests or tokens that arrived within a time window,
over the window's seconds. Each server start has its own window. docs/metrics.md has the
definitions.

A steady window opens at a fixed time and lasts for a fixed time; everything that arrives in it
counts. (Counting the requests that are sent in it would measure the offered rate, not the served
one.) When everything is sent at once, the window runs from the first send to the last end. Knows
samples and seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.almanac import intervals
from penstock.almanac.intervals import Ends, Floats, Ints, SeededRandom
from penstock.almanac.record import Interval
from penstock.almanac.samples import OK, Samples
from penstock.almanac.summaries import around

BINS = 200  # number of time bins, over all server starts together
# without a steady state, the rate's noise is measured between these shares of all tokens, where the
# engine runs at full speed
PLATEAU = (0.1, 0.9)


@dataclass(frozen=True)
class RateWindow:
    """The windows of a load level, one per server start. begins: when each opens; lengths: how long
    each lasts. Both in seconds. between: whether differences between the starts widen intervals."""

    starts: Ints
    begins: Floats
    lengths: Floats
    steady: bool
    between: bool = True

    @property
    def seconds(self) -> float:
        return float(self.lengths.sum())


def issued(samples: Samples) -> Floats:
    """Returns each request's intended send time, or its actual one where there was no plan (a
    closed loop)."""
    return np.where(np.isnan(samples.intended), samples.actual, samples.intended)


def steady_window(samples: Samples, seconds: float, opens: float) -> RateWindow:
    starts = np.unique(samples.start[samples.window]).astype(np.int64)
    each = np.full(len(starts), seconds / len(starts))
    return RateWindow(starts, np.full(len(starts), opens), each, True)


def whole_window(samples: Samples) -> RateWindow:
    """Returns the window from the first send to the last end of the counted requests (of the
    complete ones, if there are any)."""
    starts = np.unique(samples.start[samples.window]).astype(np.int64)
    begins, lengths = [], []
    for start in starts:
        own = samples.window & (samples.start == start)
        complete = own & (samples.outcome == OK)
        ends = samples.end[complete if complete.any() else own]
        begins.append(
            float(np.nanmin(samples.actual[own]))
            if not np.isnan(samples.actual[own]).all()
            else 0.0
        )
        lengths.append(
            max(float(np.nanmax(ends)) - begins[-1], 0.0) if not np.isnan(ends).all() else 0.0
        )
    return RateWindow(starts, np.array(begins), np.array(lengths), False)


def start_rates(samples: Samples, window: RateWindow) -> list[float]:
    """Returns the rate of output tokens in each server start."""
    output = _output(_counted(samples, window))
    return [
        float(output.amount[own].sum()) / length
        for start, begin, length in zip(window.starts, window.begins, window.lengths, strict=True)
        if length > 0
        for own in [
            (output.start == start) & (output.time >= begin) & (output.time <= begin + length)
        ]
    ]


def rates_of(samples: Samples, window: RateWindow, dice: SeededRandom) -> Sequence[Interval | None]:
    """Returns the rates of requests, of output tokens and of all tokens; None where nothing was
    complete."""
    counted = _counted(samples, window)
    kinds = (_ended(counted), _output(counted), _all_tokens(counted))
    if window.seconds <= 0 or not (samples.outcome == OK).any():
        return None, None, None
    if window.steady:
        return [_steady(each, window, dice) for each in kinds]
    noise = _noise_of_plateau(kinds[1], window)
    rates = [_whole(each, window, noise) for each in kinds]
    if (samples.outcome[samples.window] == "unfinished").any():
        # The time limit cut requests off and their work is not counted, so the upper end is
        # unknown.
        rates = [rate.model_copy(update={"high": None}) for rate in rates]
    return rates


@dataclass(frozen=True)
class _Arrivals:
    start: npt.NDArray[np.int32]
    time: Floats
    amount: Floats


def _counted(samples: Samples, window: RateWindow) -> Samples:
    """Returns the requests whose arrivals count: the complete ones, and in a steady window also
    those that the load level's end cut off, because their tokens arrived like any others."""
    if not window.steady:
        return samples.of((samples.outcome == OK) & samples.window)
    return samples.of((samples.outcome == OK) | (samples.outcome == "unfinished"))


def _ended(samples: Samples) -> _Arrivals:
    done = samples.of(samples.outcome == OK)
    return _Arrivals(done.start, done.end, np.ones(len(done)))


def _output(samples: Samples) -> _Arrivals:
    """Returns the arrival times and amounts of output tokens. Each event carries an equal part of
    its request's tokens. A request that was cut off has no token count: its events carry the mean
    of the complete requests.
    """
    streamed = ~np.isnan(samples.first)
    events = np.array([len(gaps) + 1 for gaps in samples.gaps], np.int64) * streamed
    known = (samples.output_tokens >= 0) & (samples.outcome == OK)
    usual = samples.output_tokens[known & streamed].sum() / max(
        int(events[known & streamed].sum()), 1
    )
    per_event = np.where(known, samples.output_tokens / np.maximum(events, 1), usual)
    late = known & ~streamed  # not streamed: all its tokens count at its end
    times = np.concatenate([event_times(samples.of(streamed)), samples.end[late]])
    start = np.concatenate([np.repeat(samples.start, events), samples.start[late]])
    return _Arrivals(
        start, times, np.concatenate([np.repeat(per_event, events), samples.output_tokens[late]])
    )


def _all_tokens(samples: Samples) -> _Arrivals:
    """Returns the arrival times and amounts of output and prompt tokens. A prompt counts at its
    request's first token, when the server has read it; for requests that were not streamed, at the
    end. A request that was cut off has no prompt count: the requested length is used.
    """
    output = _output(samples)
    late = np.isnan(samples.first) & (samples.outcome == OK)
    read = np.where(late, samples.end, samples.first)
    tokens = np.where(samples.prompt_tokens >= 0, samples.prompt_tokens, samples.asked_prompt)
    known = ~np.isnan(read) & (tokens >= 0)
    return _Arrivals(
        np.concatenate([output.start, samples.start[known]]),
        np.concatenate([output.time, read[known]]),
        np.concatenate([output.amount, tokens[known]]),
    )


def event_times(samples: Samples) -> Floats:
    """Returns the time of every event of these streamed requests, float64 [events], one request
    after another."""
    if not len(samples):
        return np.zeros(0)
    counts = np.array([len(gaps) + 1 for gaps in samples.gaps], np.int64)
    heads = np.cumsum(counts) - counts
    steps = np.zeros(int(counts.sum()))
    inner = np.ones(len(steps), bool)
    inner[heads] = False
    steps[inner] = np.concatenate([np.asarray(gaps, np.float64) for gaps in samples.gaps])
    since = np.cumsum(steps)
    return np.asarray(
        since - np.repeat(since[heads], counts) + np.repeat(samples.first, counts), np.float64
    )


def _steady(arrivals: _Arrivals, window: RateWindow, dice: SeededRandom) -> Interval:
    bins = max(BINS // len(window.starts), 20)
    series, arrived = [], 0
    for start, begin, length in zip(window.starts, window.begins, window.lengths, strict=True):
        own = arrivals.start == start
        edges = (begin, begin + length)
        amounts, _ = np.histogram(arrivals.time[own], bins, edges, weights=arrivals.amount[own])
        series.append(amounts * (bins / length))
        arrived += int(((arrivals.time[own] >= edges[0]) & (arrivals.time[own] <= edges[1])).sum())
    by_start = [float(each.mean()) for each in series]
    value = float(np.mean(by_start))
    ends = intervals.mean_ends(series, dice) if arrived >= intervals.FEWEST else Ends(None, None)
    return around(value, intervals.across_starts(value, ends, by_start if window.between else ()))


def _whole(arrivals: _Arrivals, window: RateWindow, noise: Ends) -> Interval:
    """Returns a rate: the total amount over the total time. Its relative interval is `noise`, which
    is common to the rates of requests and tokens because they have the same seconds."""
    amounts = [float(arrivals.amount[arrivals.start == start].sum()) for start in window.starts]
    value = sum(amounts) / window.seconds
    by_start = [
        amount / length
        for amount, length in zip(amounts, window.lengths, strict=True)
        if length > 0
    ]
    if noise.low is None or noise.high is None:
        return around(value, noise)
    ends = Ends(value * noise.low, value * noise.high)
    return around(value, intervals.across_starts(value, ends, by_start if window.between else ()))


def _noise_of_plateau(arrivals: _Arrivals, window: RateWindow) -> Ends:
    """Returns the rate's 95 % interval as a share of the rate. Only the stretch at full speed
    counts: the ramp-up, the end and the slow trend are the same in a repetition. Each server start
    gives one rate; its variance is estimated from the differences between neighbouring stretches.
    """
    series: list[Floats] = []
    for start in window.starts:
        own = arrivals.start == start
        order = np.argsort(arrivals.time[own], kind="stable")
        times, amounts = arrivals.time[own][order], arrivals.amount[own][order]
        if len(times) < intervals.FEWEST:
            return Ends(None, None)
        share = np.cumsum(amounts) / max(float(amounts.sum()), 1e-300)
        low, high = times[np.searchsorted(share, PLATEAU)]
        if high <= low:
            return Ends(None, None)
        bins = max(BINS // len(window.starts), 20)
        series.append(
            np.histogram(times, bins, (low, high), weights=amounts)[0] / float(high - low) * bins
        )
    return _over_mean(intervals.steady_ends(series), series)


def _over_mean(ends: Ends, series: Sequence[Floats]) -> Ends:
    mean = float(np.concatenate(series).mean())
    if ends.low is None or ends.high is None or mean <= 0:
        return Ends(None, None)
    return Ends(ends.low / mean, ends.high / mean)
