"""Means and quantiles of request times. A spread is a mean and four quantiles, each with its 95 %
interval, rounded as records store them.

Knows arrays of seconds in the order in which requests were sent, each with its server start; and
gaps between tokens, several per request.
"""

from __future__ import annotations

import numpy as np

from penstock.almanac import intervals
from penstock.almanac.intervals import Ends, Floats, Ints, SeededRandom
from penstock.almanac.record import Interval, Spread
from penstock.almanac.samples import Samples

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
DIGITS = 6  # significant digits of a figure in a benchmark record
GAP_BINS, GAP_BLOCKS, GAP_DRAWS = 256, 100, 400


def spread_of(
    values: Floats, starts: Ints, dice: SeededRandom, between: bool = True
) -> Spread | None:
    """Returns the spread of values, given in order of issue with the server start of each. NaN
    (nothing was streamed) is left out. between: whether differences between starts widen
    intervals."""
    known = ~np.isnan(values)
    values, starts = np.maximum(values[known], 0.0), starts[known]
    if not len(values):
        return None
    series = by_start_of(values, starts)
    worth = intervals.effective([intervals.ranks(each) for each in series])
    ordered, mean = np.sort(values), float(values.mean())
    parts = series if between else []
    ends = intervals.across_starts(
        mean, intervals.mean_ends(series, dice), [float(each.mean()) for each in parts]
    )
    made = {"mean": around(mean, ends)}
    for name, level in QUANTILES.items():
        value = float(np.quantile(ordered, level))
        ends = intervals.quantile_ends(ordered, level, worth)
        made[name] = around(
            value,
            intervals.across_starts(
                value, ends, [float(np.quantile(each, level)) for each in parts]
            ),
        )
    return Spread(**made)


def gaps_of(done: Samples, dice: SeededRandom, between: bool = True) -> Spread | None:
    """Returns the spread of the gaps between tokens, over all requests. Gaps of one request and of
    its neighbours depend on each other, so the bootstrap draws blocks of requests, each with all
    its gaps, counted in bins.
    """
    counts = np.array([len(gaps) for gaps in done.gaps], np.int64)
    if not counts.sum():
        return None
    gaps = np.concatenate([np.asarray(each, np.float64) for each in done.gaps])
    ordered, mean = np.sort(gaps), float(gaps.mean())
    values = {"mean": mean} | {
        key: float(np.quantile(ordered, level)) for key, level in QUANTILES.items()
    }
    if np.count_nonzero(counts) < intervals.FEWEST:
        return Spread(**{key: around(value, Ends(None, None)) for key, value in values.items()})
    blocks = _blocks(done, counts)
    drawn = _drawn_gaps(gaps, np.repeat(blocks, counts), ordered, dice)
    stretch = intervals.t_value(int(blocks.max())) / intervals.Z
    made = {}
    for key, value in values.items():
        low, high = np.quantile(drawn[key], [0.025, 0.975]) - float(np.median(drawn[key]))
        ends = Ends(value + stretch * float(low), value + stretch * float(high))
        parts = [gaps[np.repeat(done.start == start, counts)] for start in np.unique(done.start)]
        by_start = [
            float(part.mean() if key == "mean" else np.quantile(part, QUANTILES[key]))
            for part in parts
            if between and len(part)
        ]
        made[key] = around(value, intervals.across_starts(value, ends, by_start))
    return Spread(**made)


def _blocks(done: Samples, counts: Ints) -> Ints:
    """Returns each request's bootstrap block, int [n]. A block has neighbouring requests of one
    server start; there are about GAP_BLOCKS blocks at most."""
    means = np.array([float(np.mean(each)) if len(each) else 0.0 for each in done.gaps])
    series = by_start_of(means, done.start)
    length = max(
        intervals.block_length(series, intervals.effective(series)), -(-len(counts) // GAP_BLOCKS)
    )
    blocks, begin = [], 0
    for each in series:
        blocks.append(begin + np.arange(len(each)) // length)
        begin = int(blocks[-1][-1]) + 1
    return np.concatenate(blocks)


def _drawn_gaps(
    gaps: Floats, block: Ints, ordered: Floats, dice: SeededRandom
) -> dict[str, Floats]:
    """Returns name -> GAP_DRAWS bootstrap values of the gaps' mean and quantiles, from blocks drawn
    with replacement."""
    near = [level + (1 - level) * np.linspace(-0.5, 0.5, GAP_BINS) for level in QUANTILES.values()]
    # place more edges of the histogram's bins near the reported quantiles
    at = np.concatenate([np.linspace(0, 1, GAP_BINS), *near]) * (len(ordered) - 1)
    edges = np.unique(ordered[at.astype(np.int64)])
    place, number = np.searchsorted(edges, gaps), int(block.max()) + 1
    held = np.bincount(block * len(edges) + place, minlength=number * len(edges)).reshape(
        number, -1
    )
    chosen = dice.below(number, (GAP_DRAWS, number))
    times = np.zeros((GAP_DRAWS, number))
    np.add.at(times, (np.arange(GAP_DRAWS)[:, None], chosen), 1.0)
    mass = np.cumsum(times @ held, axis=1)
    total = np.maximum(times @ held.sum(1), 1.0)
    drawn = {"mean": times @ np.bincount(block, gaps, number) / total}
    for name, level in QUANTILES.items():
        drawn[name] = edges[np.argmax(mass >= level * mass[:, -1:], axis=1)]
    return drawn


def by_start_of(values: Floats, starts: Ints) -> list[Floats]:
    return [values[starts == start] for start in np.unique(starts)]


def around(value: float, ends: Ends) -> Interval:
    low = None if ends.low is None else short(min(max(ends.low, 0.0), value))
    high = None if ends.high is None else short(max(ends.high, value))
    return Interval(value=short(value), low=low, high=high)


def short(value: float, digits: int = DIGITS) -> float:
    return float(f"{value:.{digits}g}")
