"""Choices: a candidate wins past the noise of its rounds, else the default stays."""

from __future__ import annotations

from itertools import count

import pytest

from penstock.artifact.manifest import Value
from penstock.build.decide import REPEATS, decide, measure, middle, noise_percent


def test_a_clear_winner_is_taken_with_what_it_won() -> None:
    found = decide(
        "k",
        [1, 2, 3],
        {"1": [100, 101, 99], "2": [110, 111, 109], "3": [105, 99, 103]},
        "tok/s",
        more=True,
    )
    assert (found.chosen, found.default) == (2, 1)
    assert found.won_percent == pytest.approx(
        10.0, abs=0.2
    ) and found.noise_percent == pytest.approx(0.1, abs=0.05)


def test_within_the_noise_the_default_stays() -> None:
    found = decide("k", [1, 2], {"1": [100, 100, 100], "2": [101, 110, 95]}, "tok/s", more=True)
    assert (found.chosen, found.won_percent) == (1, 0.0) and found.noise_percent == pytest.approx(
        7.5
    )


def test_a_gain_too_small_to_matter_is_left() -> None:
    found = decide(
        "k", [1, 2], {"1": [1000, 1000, 1000], "2": [1004, 1004, 1004]}, "tok/s", more=True
    )
    assert found.chosen == 1


def test_less_is_better_where_it_is_told_so() -> None:
    measured = {"auto": [10.0, 10.1, 9.9], "off": [9.0, 9.1, 8.9], "always": [12.0, 12.0, 12.0]}
    assert decide("k", ["auto", "off", "always"], measured, "ms", more=False).chosen == "off"
    assert decide("k", ["auto", "off", "always"], measured, "ms", more=True).chosen == "always"


def test_rounds_are_compared_one_by_one() -> None:
    """A machine that slows down from round to round is no noise of the choice."""
    found = decide(
        "k", [None, 7], {"default": [100, 80, 60], "7": [105, 84, 63]}, "tok/s", more=True
    )
    assert found.chosen == 7 and found.noise_percent == 0.0


def test_what_was_not_reached_keeps_the_default_and_says_so() -> None:
    found = decide("k", [1, 2], {"1": [1.0, 1.0], "2": [9.0, 9.0]}, "tok/s", more=True)
    assert (found.chosen, found.won_percent) == (1, None) and "not reached" in found.note


def test_candidates_run_by_turns_until_the_time_is_over() -> None:
    clock, order = count(), list[Value]()

    def run(value: Value) -> float:
        order.append(value)
        return float(next(clock))

    found = measure([1, 2, 3], run, deadline=1000.0, clock=lambda: float(next(clock)))
    assert (
        order == [1, 2, 3, 3, 2, 1, 1, 2, 3]
        and [len(each) for each in found.values()] == [REPEATS] * 3
    )
    order.clear()
    measure([1, 2], run, deadline=next(clock) + 5.0, clock=lambda: float(next(clock)))
    assert order == [1, 2]  # a second round as long as the first would have passed the end


def test_the_middle_and_half_of_the_span() -> None:
    assert middle([3.0, 1.0, 2.0]) == 2.0 and noise_percent([1.9, 2.0, 2.3]) == pytest.approx(10.0)
