"""pass@k against counting every subset, and the interval against what it promises."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from penstock.jobs import pass_at_k as pass_at_k_room
from penstock.jobs.pass_at_k import coverage, majority, pass_at_k, powers


@given(st.integers(1, 9), st.data())
def test_against_counting(n: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations(range(n), k))
    hits = sum(any(i < right for i in subset) for subset in subsets)
    assert pass_at_k(n, right, k) == pytest.approx(hits / len(subsets))


def test_large_numbers_stay_numbers() -> None:
    assert pass_at_k(65_536, 1, 32_768) == pytest.approx(0.5)
    assert pass_at_k(10_000, 9_999, 2) == 1.0
    assert pass_at_k(10_000, 0, 10_000) == 0.0


@pytest.mark.parametrize(("n", "right", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_what_doesnt_exist(n: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="doesn't exist"):
        pass_at_k(n, right, k)


def test_coverage_is_the_mean_and_rises() -> None:
    points = coverage([8, 8, 8], [0, 1, 8], powers(8), seed=1)
    assert [p.k for p in points] == [1, 2, 4, 8]
    assert points[0].value == pytest.approx((0 + 1 / 8 + 1) / 3)
    assert points[-1].value == pytest.approx(2 / 3)
    assert all(a.value <= b.value for a, b in pairwise(points))
    assert all(p.low <= p.value <= p.high for p in points)
    assert points == coverage([8, 8, 8], [0, 1, 8], powers(8), seed=1)


POPULATIONS = {  # name: how likely each problem's samples are right, and the mean
    "as they come": (lambda draw, count: draw.uniform(0, 1, count), 0.5),
    "one in 30": (lambda draw, count: np.where(draw.random(count) < 1 / 30, 0.6, 0.0), 0.02),
    "all hard": (lambda draw, count: np.full(count, 0.01), 0.01),
    "nearly all": (lambda draw, count: np.where(draw.random(count) < 0.9, 1.0, 0.5), 0.95),
}


@pytest.mark.parametrize("problems", [4, 25])
@pytest.mark.parametrize("name", POPULATIONS)
def test_the_interval_holds_the_truth_as_often_as_it_says(
    name: str, problems: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A percentile bootstrap over problems held it 10 to 96 times of 100."""
    # enough for a count, in a fifth of the time
    monkeypatch.setattr(pass_at_k_room, "BOOTSTRAPS", 2_000)
    likely, truth = POPULATIONS[name]
    draw, held = np.random.default_rng(3), 0
    for trial in range(100):
        right = draw.binomial(4, likely(draw, problems))
        point = coverage([4] * problems, right.tolist(), [1], seed=trial)[0]
        held += point.low <= truth <= point.high
    assert held >= 95


@pytest.mark.parametrize("problems", [1, 2, 40, 1000])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_where_problems_are_solved_or_not_the_interval_is_the_exact_one(
    problems: int, share: float
) -> None:
    """Every sample right or none: at each k it is what scipy's Clopper-Pearson says of so many
    problems."""
    solved = int(problems * share)
    exact = binomtest(solved, problems).proportion_ci(0.95, "exact")
    for point in coverage(
        [8] * problems, [8] * solved + [0] * (problems - solved), powers(8), seed=1
    ):
        assert (point.low, point.high) == pytest.approx((exact.low, exact.high), abs=1e-9)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_no_interval_is_of_zero_width(right: list[int]) -> None:
    points = coverage([4] * len(right), right, powers(4), seed=1)
    assert all(
        point.low < point.high and point.low <= point.value <= point.high for point in points
    )


def test_majority() -> None:
    assert majority(["1", "2", "2", None, None, None]) == "2"
    assert majority(["3", "1", "1", "3"]) == "3"
    assert majority([None, None]) is None
    assert majority([]) is None
