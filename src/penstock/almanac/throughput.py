"""Rates of a point: what arrived within its window of time, by start of the server. Definitions:
docs/metrics.md.

A steady window stands open from `opens` for so many seconds, and whatever arrives in it counts;
where everything is sent at once it runs from the first send to the last end. Requests issued in it
would tell what was offered, not what was served. It knows samples and seconds.
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

BINS = 200  # of time, over all starts together
# of the tokens: between these a point without a steady state runs at its own speed
PLATEAU = (
    0.1,
    0.9,
)


@dataclass(frozen=True)
class RateWindow:
    """begins: when it opens in each start; lengths: how long it stands open in each, in seconds."""

    starts: Ints
    begins: Floats
    lengths: Floats
    steady: bool

    @property
    def seconds(self) -> float:
        return float(self.lengths.sum())


def issued(samples: Samples) -> Floats:
    """Returns when each request was to start: by the plan, or, where there was none (a closed
    loop), when it did."""
    return np.where(np.isnan(samples.intended), samples.actual, samples.intended)


def steady_window(samples: Samples, seconds: float, opens: float) -> RateWindow:
    starts = np.unique(samples.start[samples.window]).astype(np.int64)
    each = np.full(len(starts), seconds / len(starts))
    return RateWindow(starts, np.full(len(starts), opens), each, True)


def whole_window(samples: Samples) -> RateWindow:
    """Returns the window from the first send to the last end of the window's requests: of the
    complete ones, where there are any."""
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
        # Its time limit cut it off before its end: work of the cut ones is not in it, so nothing is
        # known above.
        rates = [rate.model_copy(update={"high": None}) for rate in rates]
    return rates


@dataclass(frozen=True)
class _Arrivals:
    start: npt.NDArray[np.int32]
    time: Floats
    amount: Floats


def _counted(samples: Samples, window: RateWindow) -> Samples:
    """Returns the requests whose arrivals count: complete requests, and in a steady window those
    that were only cut off by the point's end (their tokens came as any other's)."""
    if not window.steady:
        return samples.of((samples.outcome == OK) & samples.window)
    return samples.of((samples.outcome == OK) | (samples.outcome == "unfinished"))


def _ended(samples: Samples) -> _Arrivals:
    done = samples.of(samples.outcome == OK)
    return _Arrivals(done.start, done.end, np.ones(len(done)))


def _output(samples: Samples) -> _Arrivals:
    """Returns output tokens by their event's time. An event carries its request's tokens over its
    events; of a request that was cut off nobody told the tokens: the mean of the complete ones."""
    streamed = ~np.isnan(samples.first)
    events = np.array([len(gaps) + 1 for gaps in samples.gaps], np.int64) * streamed
    known = (samples.output_tokens >= 0) & (samples.outcome == OK)
    usual = samples.output_tokens[known & streamed].sum() / max(
        int(events[known & streamed].sum()), 1
    )
    per_event = np.where(known, samples.output_tokens / np.maximum(events, 1), usual)
    late = known & ~streamed  # not streamed: all came at the end
    times = np.concatenate([event_times(samples.of(streamed)), samples.end[late]])
    start = np.concatenate([np.repeat(samples.start, events), samples.start[late]])
    return _Arrivals(
        start, times, np.concatenate([np.repeat(per_event, events), samples.output_tokens[late]])
    )


def _all_tokens(samples: Samples) -> _Arrivals:
    """Returns the output as it comes, and each prompt with its request's first token, when it has
    been read; what was not streamed, at its end. Of a request that was cut off nobody told the
    prompt's tokens: those that were asked for."""
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
    """Returns [events]: the time of every event of these streamed requests, one request after the
    other."""
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
    return around(value, intervals.across_starts(value, ends, by_start))


def _whole(arrivals: _Arrivals, window: RateWindow, noise: Ends) -> Interval:
    """Returns everything over the whole time. All three rates are amounts over the same seconds:
    they share their noise."""
    amounts = [float(arrivals.amount[arrivals.start == start].sum()) for start in window.starts]
    value = sum(amounts) / window.seconds
    by_start = [
        amount / length
        for amount, length in zip(amounts, window.lengths, strict=True)
        if length > 0
    ]
    if noise.low is None or noise.high is None:
        return around(value, noise)
    return around(
        value, intervals.across_starts(value, Ends(value * noise.low, value * noise.high), by_start)
    )


def _noise_of_plateau(arrivals: _Arrivals, window: RateWindow) -> Ends:
    """Returns the rate's interval over the rate, while the point ran at its own speed: ramp and
    tail are no noise, nor is the course between. One number a start came out; how much it could
    have been another is seen in how neighbouring stretches of its middle differ."""
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
