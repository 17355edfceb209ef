"""What the soak calls growth: leaks whatever the noise, and not an allocator that warms up or one that is restless."""

from __future__ import annotations

import numpy as np
import pytest
import trend

HOUR = np.arange(3600.0)
MOST = 16.0  # MB an hour


def series(sizes: np.ndarray) -> list[tuple[float, float]]:
    return list(zip(range(len(sizes)), sizes.tolist(), strict=True))


def restless(seed: int, seconds: int = 3600) -> np.ndarray:
    """Ups and downs of about 1 MB that last for half a minute, in steps of a quarter; now and then a peak of 20 MB."""
    rng = np.random.default_rng(seed)
    shocks, level, out = rng.normal(0, 0.25, seconds), 0.0, np.empty(seconds)
    for second, shock in enumerate(shocks):
        level = level * 0.967 + shock
        out[second] = level
    return np.round(out * 4) / 4 + 20 * (rng.random(seconds) < 0.01)


@pytest.mark.parametrize("seed", range(10))
def test_a_leak_grows_and_what_is_flat_is_flat(seed: int) -> None:
    noise = 100 + restless(seed)
    assert trend.verdict(series(noise), MOST) == trend.FLAT
    leak = series(noise + np.floor(30 * HOUR / 3600))  # in steps of a megabyte
    assert trend.verdict(leak, MOST) == trend.GROWS and 25 < trend.late(leak).slope < 35


@pytest.mark.parametrize("seed", range(10))
def test_a_warm_up_is_no_leak_and_a_leak_behind_one_is(seed: int) -> None:
    """A record is broken ever more rarely: 7 MB with each factor of e. Its whole first half rises as a leak would."""
    warm = 100 + restless(seed) + 7 * np.log(1 + HOUR / 10)
    assert trend.early(series(warm)).slope > MOST
    assert trend.verdict(series(warm), MOST) == trend.FLAT
    assert trend.verdict(series(warm + 40 * HOUR / 3600), MOST) == trend.GROWS


def test_what_cannot_be_told_is_not_called_flat() -> None:
    at_the_limit = series(100 + restless(1) + MOST * HOUR / 3600)
    assert trend.verdict(at_the_limit, MOST) == trend.UNSETTLED
    assert trend.late(at_the_limit).low < MOST < trend.late(at_the_limit).high
    slow = series(100 + restless(2) + 60 * (1 - np.exp(-HOUR / 1500)))  # 43 MB an hour at the half, 13 at the end
    assert trend.late(slow).low > MOST and trend.verdict(slow, MOST) == trend.UNSETTLED


def test_the_interval_holds_the_slope() -> None:
    """Of 200 series with a known slope no more than a few are missed: the windows are long beside the ups and downs."""
    missed = 0
    for seed in range(200):
        found = trend.late(series(restless(seed) + 7 * HOUR / 3600))
        missed += not found.low <= 7 <= found.high
    assert missed <= 10


def test_short_runs_are_judged_by_their_rise() -> None:
    short = series(100 + restless(3, 120) + np.arange(120.0) / 10)
    assert not trend.long_enough(short) and trend.long_enough(series(HOUR)) and not trend.long_enough([])
    assert 8 < trend.rise(short) < 12
    assert trend.verdict([(0.0, 1.0), (1.0, 2.0)], MOST) == trend.UNSETTLED
