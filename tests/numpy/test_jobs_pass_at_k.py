"""pass@k against counting every subset, and the interval against what it promises."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_powers() -> None:
    assert [powers(n) for n in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


def test_coverage_is_the_mean_and_rises() -> None:
    points = coverage([8, 8, 8], [0, 1, 8], powers(8), seed=1)
    assert [p.k for p in points] == [1, 2, 4, 8]
    assert points[0].value == pytest.approx((0 + 1 / 8 + 1) / 3)
    assert points[-1].value == pytest.approx(2 / 3)
    assert all(a.value <= b.value for a, b in pairwise(points))
    assert all(p.low <= p.value <= p.high for p in points)
    assert points == coverage([8, 8, 8], [0, 1, 8], powers(8), seed=1)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    """40 problems drawn 150 times: a 95 % interval out of 40 values holds the truth 88 to 100 % of times."""
    draw, hits = np.random.default_rng(3), 0
    for trial in range(150):
        easy = draw.uniform(0, 1, 40)
        right = draw.binomial(16, easy)
        point = coverage([16] * 40, right.tolist(), [1], seed=trial)[0]
        hits += point.low <= 0.5 <= point.high
    assert 0.88 <= hits / 150 <= 1.0


def test_majority() -> None:
    assert majority(["1", "2", "2", None, None, None]) == "2"
    assert majority(["3", "1", "1", "3"]) == "3"
    assert majority([None, None]) is None
    assert majority([]) is None
