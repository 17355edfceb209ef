"""95 % intervals for requests that are not independent. Intervals are of shares, quantiles, means
and rates. Requests that wait in one queue depend on each other, so n of them carry as much
information as a smaller number of independent ones (`effective`). docs/metrics.md has the reasons
for these methods. The caller seeds the random numbers by the data. Knows numbers, not requests.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.integer[Any]]

CONFIDENCE = 0.95
DRAWS = 1000
Z = 1.959964  # quantile of the normal distribution for a two-sided 95 % interval
# Student's t for a two-sided 95 % interval, by degrees of freedom 1 to 20. Servers have few starts.
T = (
    12.7062,
    4.3027,
    3.1824,
    2.7764,
    2.5706,
    2.4469,
    2.3646,
    2.3060,
    2.2622,
    2.2281,
    2.2010,
    2.1788,
    2.1604,
    2.1448,
    2.1314,
    2.1199,
    2.1098,
    2.1009,
    2.0930,
    2.0860,
)
FEWEST = 10  # least number of values in a mean for which an interval is given
PIECES = 20  # number of stretches into which a series with a slow trend is cut


@dataclass(frozen=True)
class Ends:
    """The two ends of an interval. None: too few values to say."""

    low: float | None
    high: float | None


# --- intervals of quantiles, from the binomial distribution


def beta_cdf(x: npt.ArrayLike, a: npt.ArrayLike, b: npt.ArrayLike) -> Floats:
    """Returns the regularised incomplete beta function, elementwise, by its continued fraction
    (Lentz's method; DLMF 8.17.22), for a, b > 0 and 0 <= x <= 1. Error below 1e-10 up to a + b of
    1e7. (Written here instead of using scipy: `penstock demo` and `monkeys` need it on a plain
    install.)
    """
    x, a, b = np.broadcast_arrays(*(np.asarray(each, np.float64) for each in (x, a, b)))
    swap = x > (a + 1) / (a + b + 2)  # use the other tail where the fraction converges faster
    x, a, b = np.where(swap, 1 - x, x), np.where(swap, b, a), np.where(swap, a, b)
    inside = np.clip(x, 1e-300, 1 - 1e-16)
    front = np.exp(a * np.log(inside) + b * np.log1p(-inside) - _log_beta(a, b)) / a
    value = np.where(x <= 0, 0.0, front * _fraction(inside, a, b))
    return np.clip(np.where(swap, 1 - value, value), 0.0, 1.0)


def _fraction(x: Floats, a: Floats, b: Floats) -> Floats:
    def nonzero(value: Floats) -> Floats:
        return np.where(np.abs(value) < 1e-300, 1e-300, value)

    value = d = 1 / nonzero(1 - (a + b) * x / (a + 1))
    c = np.ones_like(x)
    for m in range(1, 20_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d, c = 1 / nonzero(1 + term * d), nonzero(1 + term / c)
            value = value * d * c
        if np.all(np.abs(d * c - 1) < 1e-13):
            break
    return value


def _log_beta(a: Floats, b: Floats) -> Floats:
    log_gamma = np.vectorize(math.lgamma, [np.float64])
    return np.asarray(log_gamma(a) + log_gamma(b) - log_gamma(a + b), np.float64)


def _beta_quantile(level: float, a: Floats, b: Floats) -> Floats:
    """Returns x with beta_cdf(x, a, b) = level, by Newton's steps; a step that would leave the
    bracket is replaced by a bisection."""
    low, high, x, scale = np.zeros(a.shape), np.ones(a.shape), a / (a + b), _log_beta(a, b)
    for _ in range(60):
        away = beta_cdf(x, a, b) - level
        low, high = np.where(away < 0, x, low), np.where(away < 0, high, x)
        inside = np.clip(x, 1e-300, 1 - 1e-16)
        density = np.exp((a - 1) * np.log(inside) + (b - 1) * np.log1p(-inside) - scale)
        step = x - away / np.maximum(density, 1e-300)
        before, x = x, np.where((step > low) & (step < high), step, (low + high) / 2)
        if np.all(np.abs(x - before) < 1e-12):
            break
    return np.asarray(x, np.float64)


def share_interval(hits: npt.ArrayLike, of: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Returns the Clopper-Pearson interval of hits / of; both may be fractional. of = 0 gives the
    whole range."""
    hits, of = np.broadcast_arrays(np.asarray(hits, np.float64), np.asarray(of, np.float64))
    tail = (1 - CONFIDENCE) / 2
    misses = np.maximum(of - hits, 0.0)
    low = np.where(hits <= 0, 0.0, _beta_quantile(tail, np.maximum(hits, 1e-9), misses + 1))
    high = np.where(misses <= 0, 1.0, _beta_quantile(1 - tail, hits + 1, np.maximum(misses, 1e-9)))
    return np.where(of > 0, low, 0.0), np.where(of > 0, high, 1.0)


def quantile_ends(ordered: Floats, level: float, effective: float) -> Ends:
    """Returns the 95 % interval of a quantile: two of the values `ordered`, chosen by rank. The
    share of the distribution below the value of rank r is Beta(r, n + 1 - r) distributed; n is the
    effective (independent) number of values. An end beyond the data is None (p99 needs 368
    independent values).
    """
    count = len(ordered)
    if not count or effective < 1:
        return Ends(None, None)
    ranks = np.arange(1, count + 1) * (effective / count)
    middle, away = level * effective, 8 * (1 + math.sqrt(level * (1 - level) * effective))
    # beyond 8 standard deviations the probability is 0 or 1
    near = np.abs(ranks - middle) <= away
    # probability that the quantile's true value is at least ordered[r]: P(F(ordered[r]) <= level)
    below = np.where(ranks < middle, 1.0, 0.0)
    below[near] = beta_cdf(level, ranks[near], effective + 1 - ranks[near])
    tail = (1 - CONFIDENCE) / 2
    low, high = np.flatnonzero(below >= 1 - tail), np.flatnonzero(below <= tail)
    return Ends(
        float(ordered[low[-1]]) if len(low) else None,
        float(ordered[high[0]]) if len(high) else None,
    )


# --- dependence between successive requests


def effective(series: Sequence[Floats]) -> float:
    """Returns the number of independent values that carry as much information about the mean as all
    series together (one series per server start, each in order of time). It is n / (1 + 2 sum of
    autocorrelations); Geyer's initial positive sequence ends the sum. Never more than n; n for
    constant values.
    """
    total = sum(len(each) for each in series)
    if total < 4:
        return float(total)
    covariance = _autocovariance(series)
    if covariance[0] <= 1e-18:
        return float(total)
    rho = covariance / covariance[0]
    pairs = rho[: len(rho) // 2 * 2].reshape(-1, 2).sum(1)
    over = np.flatnonzero(pairs <= 0)
    pairs = np.minimum.accumulate(pairs[: over[0] if len(over) else len(pairs)])
    return float(total / max(2 * pairs.sum() - 1, 1.0))


def _autocovariance(series: Sequence[Floats]) -> Floats:
    """Returns the autocovariance by lag, float64 [lags]. Each lag's products around the series'
    means are summed over all series and divided by their total length (the biased estimate, which
    the sum over lags needs). Lags go up to half of the longest series.
    """
    longest = max(len(each) for each in series)
    sums, total = np.zeros(max(longest // 2, 2)), 0
    for each in series:
        if len(each) < 2:
            continue
        away = each - each.mean()
        size = 1 << (2 * len(each) - 1).bit_length()
        products = np.fft.irfft(np.abs(np.fft.rfft(away, size)) ** 2, size)[
            : min(len(sums), len(each))
        ]
        sums[: len(products)] += products
        total += len(each)
    return sums / max(total, 1)


def ranks(values: Floats) -> Floats:
    """Returns ranks from 0 to 1; equal values get the same. `effective` uses ranks of times, so
    that a single time of 1e6 s does not dominate."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2
    return np.asarray(middle[inverse] / max(len(values), 1), np.float64)


# --- moving-block bootstrap: intervals for series of dependent values


class SeededRandom:
    """Seeded random integers. Uses only the generator's raw stream,
    which numpy promises to keep."""

    def __init__(self, *seed: object) -> None:
        digest = hashlib.sha256()
        for part in seed:
            digest.update(
                np.ascontiguousarray(part).tobytes()
                if isinstance(part, np.ndarray)
                else repr(part).encode()
            )
        self.bits = np.random.PCG64(int.from_bytes(digest.digest(), "big"))

    def below(self, bound: int, shape: tuple[int, ...]) -> Ints:
        """Returns integers 0 to bound - 1 of this shape (the bias is below bound / 2^32)."""
        raw = self.bits.random_raw(int(np.prod(shape))).reshape(shape)
        return np.asarray(((raw >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32), np.int64)


def block_length(series: Sequence[Floats], worth: float) -> int:
    """Returns a block length for the bootstrap at which blocks are nearly independent: n^(1/3), but
    at least three times n / worth, and at most a fifth of the longest series. worth: the effective
    number of independent values (`effective`).
    """
    longest = max(len(each) for each in series)
    stretch = sum(len(each) for each in series) / max(worth, 1.0)
    return int(max(1, min(max(longest ** (1 / 3), 3 * stretch), longest / 5)))


def draw_means(
    series: Sequence[Floats], length: int, dice: SeededRandom, draws: int = DRAWS
) -> Floats:
    """Returns bootstrap means of all values, float64 [draws]. For each, every series is rebuilt
    from its own blocks, drawn with replacement."""
    total = np.zeros(draws)
    for each in series:
        fits = min(length, len(each))
        # sums of the block that begins at each value
        sums = np.convolve(each, np.ones(fits), "valid")
        whole, rest = divmod(len(each), fits)
        total += sums[dice.below(len(sums), (draws, whole))].sum(1)
        if rest:
            tails = np.convolve(each, np.ones(rest), "valid")
            total += tails[dice.below(len(tails), (draws,))]
    return np.asarray(total / sum(len(each) for each in series), np.float64)


def mean_ends(series: Sequence[Floats], dice: SeededRandom) -> Ends:
    """Returns the 95 % interval of the mean over all series. The bootstrap gives its shape. Blocks
    lose the dependence across their ends, so the interval is widened to at least that of
    `effective` independent values; for few values Student's t is used.
    """
    series = [each for each in series if len(each)]
    count = sum(len(each) for each in series)
    if count < FEWEST:
        return Ends(None, None)
    value, worth = sum(float(each.sum()) for each in series) / count, effective(series)
    drawn = draw_means(series, block_length(series, worth), dice)
    # moving blocks contain the ends of a series too rarely, which shifts the mean: centre it again
    middle, spread = (
        float(drawn.mean()),
        float(drawn.std()),
    )
    if spread <= 1e-15 * abs(value):
        return Ends(value, value)
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]) - middle
    alone = (
        sum(float(((each - each.mean()) ** 2).sum()) for each in series) / count / worth
    ) ** 0.5
    stretch = max(alone / spread, 1.0) * t_value(int(worth) - 1) / Z
    return Ends(value + stretch * float(low), value + stretch * float(high))


def steady_ends(series: Sequence[Floats]) -> Ends:
    """Returns the 95 % interval of the mean over all series that follow the same slow trend
    (prompts first, then tokens). A repetition of the run would have the same trend, so it is no
    error. Only a stretch's deviation from the line through its two neighbours counts as random.

    Each series is cut into stretches, PIECES in all; a sixth of the mean square of their second
    differences is a stretch's variance (Gasser, Sroka and Jennen-Steinmetz 1986), with half as many
    degrees of freedom.
    """
    each_has = max(PIECES // max(len(series), 1), 4)
    cut = [np.array_split(each, each_has) for each in series if len(each) >= 2 * each_has]
    if not cut or len(cut) < len(series):
        return Ends(None, None)
    means = [np.array([float(piece.mean()) for piece in pieces]) for pieces in cut]
    bends = np.concatenate([np.diff(each, 2) for each in means])
    value = float(np.concatenate(list(series)).mean())
    deviation = (float((bends**2).mean()) / 6 / sum(len(each) for each in means)) ** 0.5
    away = t_value(len(bends) // 2) * deviation
    return Ends(value - away, value + away)


# --- widening an interval by the differences between server starts


def t_value(freedom: int) -> float:
    return T[min(max(freedom, 1), len(T)) - 1] if freedom <= len(T) else Z + 2.4 / freedom


def across_starts(value: float, ends: Ends, by_start: Sequence[float]) -> Ends:
    """Widens an interval by the differences between server starts. Added is the variance between
    starts that the interval does not cover yet, with Student's t for the number of starts less one.
    With one start the interval stays as it is. by_start: the value in each start.
    """
    if len(by_start) < 2 or ends.low is None or ends.high is None:
        return ends
    within = (ends.high - ends.low) / 2 / Z
    over = max(float(np.var(by_start, ddof=1)) / len(by_start) - within**2, 0.0)
    more = t_value(len(by_start) - 1) ** 2 * over
    return Ends(
        value - ((value - ends.low) ** 2 + more) ** 0.5,
        value + ((ends.high - value) ** 2 + more) ** 0.5,
    )
