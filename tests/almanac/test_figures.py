"""Figures of a point against truths that are known without them:
queues made up in made_samples.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from made_samples import LOOK, one_line, open_loop, samples_of

from penstock.almanac import figures
from penstock.almanac.intervals import SeededRandom
from penstock.almanac.record import Goal, Interval, Point
from penstock.almanac.samples import Samples, join
from penstock.almanac.summaries import gaps_of


def point(samples: Samples, **more: Any) -> Point:
    asked: dict[str, Any] = {
        "name": str(samples.point[0]),
        "kind": "open",
        "rate": 20.0,
        "concurrency": None,
        "seconds": 60.0,
        "goals": [0.1, 0.2, 1.0],
        "look": LOOK,
        "marks": [],
    }
    return figures.point_of(samples, **{**asked, **more})


def test_an_open_loop_by_hand() -> None:
    samples = open_loop()
    made = point(samples, opens=10.0)
    inside = samples.of(samples.window)
    first = inside.first - inside.intended
    assert (made.requests, made.complete, made.outcomes) == (len(inside), len(inside), {})
    assert made.output_tokens == 32 * len(inside) and made.prompt_tokens == 128 * len(inside)
    spread = made.figures.first_token
    assert spread is not None and made.figures.first_token_actual is not None
    assert spread.mean.value == pytest.approx(first.mean(), rel=1e-5)
    assert spread.p95.value == pytest.approx(np.quantile(first, 0.95), rel=1e-5)
    assert spread.p50.value - made.figures.first_token_actual.p50.value == pytest.approx(
        5e-4, rel=0.01
    )
    assert [goal.share for goal in made.goals] == pytest.approx(
        [np.mean(first <= z) for z in (0.1, 0.2, 1.0)], rel=1e-5
    )
    assert made.goals[1].goodput == pytest.approx((first <= 0.2).sum() / 60, rel=1e-5)
    assert made.figures.request_rate is not None and made.figures.output_rate is not None
    ended = ((samples.end >= 10) & (samples.end < 70)).sum()
    assert made.figures.request_rate.value == pytest.approx(ended / 60, rel=1e-5)
    rows = zip(samples.first, samples.gaps, strict=True)
    times = np.concatenate([first + np.r_[0, np.cumsum(gaps, dtype=float)] for first, gaps in rows])
    assert made.figures.output_rate.value == pytest.approx(
        ((times >= 10) & (times < 70)).sum() / 60, rel=1e-5
    )
    gaps = np.concatenate(list(inside.gaps))
    assert made.figures.inter_token is not None and made.figures.per_token is not None
    assert made.figures.inter_token.p99.value == pytest.approx(np.quantile(gaps, 0.99), rel=1e-4)
    assert made.figures.per_token.mean.value == pytest.approx(gaps.mean(), rel=1e-4)
    assert made.marks == []


def test_it_is_the_same_again_and_whatever_the_order() -> None:
    samples = open_loop(seconds=40.0)
    shuffled = samples.of(np.random.default_rng(0).permutation(len(samples)))
    assert point(samples, seconds=40.0) == point(shuffled, seconds=40.0)


def test_other_points_and_the_warm_up_are_left_out() -> None:
    mine = open_loop(name="mine", seconds=40.0)
    both = join([open_loop(name="other", seconds=40.0, seed=3, slow=9.0), mine])
    assert point(both, name="mine", seconds=40.0) == point(mine, seconds=40.0)
    slow = mine.of(np.ones(len(mine), bool))
    slow.first[~slow.window] += 100.0
    assert point(slow, seconds=40.0).figures.first_token is not None
    assert point(slow, seconds=40.0).goals[2].share == 1.0


def test_past_the_highest_rate_what_was_served_counts_not_what_was_offered() -> None:
    """50 a second are offered to a server that serves 25: it answers all of them in the end,
    minutes later."""
    sent = np.cumsum(np.random.default_rng(0).exponential(1 / 50, 4000))
    done = one_line(sent, np.full(len(sent), 1 / 25))
    samples = samples_of(sent, done - 0.03, [np.full(3, 0.01)] * len(sent), window=(10, 70))
    made = point(samples, opens=10.0, rate=50.0)
    # complete, of those issued in the window: the offer
    assert made.complete / 60 == pytest.approx(50, rel=0.05)
    assert made.figures.request_rate is not None and made.figures.output_rate is not None
    assert made.figures.request_rate.value == pytest.approx(25, rel=0.01)
    assert made.figures.output_rate.value == pytest.approx(100, rel=0.01)
    assert made.figures.total_rate is not None
    assert made.figures.total_rate.value == pytest.approx(25 * (128 + 4), rel=0.01)


def test_everything_at_once_is_an_amount_over_the_whole_time() -> None:
    done = np.arange(1, 1001) / 25
    samples = samples_of(np.zeros(1000), done - 0.03, [np.full(3, 0.01)] * 1000)
    made = point(samples, kind="saturation", rate=None, seconds=None)
    assert made.seconds == pytest.approx(40.0, rel=1e-5) and made.opens is None
    rates = made.figures
    assert (
        rates.request_rate is not None
        and rates.output_rate is not None
        and rates.total_rate is not None
    )
    assert rates.request_rate.value == pytest.approx(
        25
    ) and rates.output_rate.value == pytest.approx(100)
    assert rates.total_rate.value == pytest.approx(25 * 132)
    assert rates.output_rate.low is not None and rates.output_rate.low > 95
    # in a queue's order they would be worth two
    assert made.effective is not None and made.effective > 700
    assert made.marks == []
    turned = samples.of(np.arange(1000)[::-1])
    assert point(turned, kind="saturation", rate=None, seconds=None) == made


def test_a_point_of_which_nothing_was_complete_misses_its_goals() -> None:
    """Else a report would say that no such rate was tried."""
    samples = open_loop(seconds=40.0)
    samples.outcome[samples.window] = "unfinished"
    made = point(samples, seconds=40.0, opens=10.0)
    assert made.complete == 0 and [goal.share for goal in made.goals] == [0, 0, 0]
    assert all(goal.low == 0 < goal.high < 0.01 and goal.goodput == 0 for goal in made.goals)


def test_a_failed_request_meets_no_goal_and_has_no_times() -> None:
    samples = open_loop()
    inside = np.flatnonzero(samples.window)
    samples.outcome[inside[:100]] = "stalled"
    made = point(samples, opens=10.0)
    assert made.outcomes == {"stalled": 100} and made.complete == made.requests - 100
    assert made.goals[2].share == pytest.approx(1 - 100 / made.requests, rel=1e-5)
    assert made.figures.end_to_end is not None
    assert "failed requests" in made.marks
    failed = [at for at, end in enumerate(made.sample.end_to_end) if end == -1]
    # one in each stretch of equal length
    assert len(failed) == pytest.approx(500 * 100 / made.requests, abs=1)
    assert all(made.sample.first[at] == -1 and made.sample.per_token[at] == -1 for at in failed)


def test_the_sample_is_joint_rows_drawn_evenly() -> None:
    samples = open_loop()
    made = point(samples, opens=10.0)
    inside = samples.of(samples.window)
    rows = list(zip(made.sample.first, made.sample.per_token, made.sample.end_to_end, strict=True))
    times = zip(inside.first - inside.intended, inside.end - inside.intended, strict=True)
    truth = {(f"{first:.5g}", f"{end:.5g}"): at for at, (first, end) in enumerate(times)}
    drawn = [truth[f"{first:.5g}", f"{end:.5g}"] for first, _, end in rows]
    assert len(rows) == 500 and len(set(drawn)) == 500
    stretch = len(inside) / 500
    assert all(at * stretch - 1 <= where < (at + 1) * stretch for at, where in enumerate(drawn))
    for first, token, end in rows:
        assert first + 31 * token == pytest.approx(end, rel=1e-3)
    few = point(samples_of([0.0, 1.0], [0.5, 1.5], [np.ones(1)] * 2), seconds=10.0, opens=0.0)
    assert few.sample.first == [0.5, 0.5]


def test_what_was_not_streamed_has_no_first_token() -> None:
    samples = open_loop(seconds=40.0)
    samples.first[:] = np.nan
    samples.gaps[:] = [np.zeros(0, np.float32)] * len(samples)
    made = point(samples, seconds=40.0, opens=10.0)
    assert (
        made.figures.first_token is None
        and made.figures.inter_token is None
        and made.figures.per_token is None
    )
    assert made.goals == [] and set(made.sample.first) == {-1.0}
    assert made.figures.output_rate is not None
    assert made.figures.output_rate.value == pytest.approx(20 * 32, rel=0.1)


@pytest.mark.parametrize(
    ("change", "mark"),
    [
        ({"cached_tokens": 5}, "cached prompts"),
        ({"outcome": "usage"}, "usage disagreed"),
        ({"outcome": "length"}, "usage disagreed"),
        ({"intended": np.nan}, "intended start unknown"),
    ],
)
def test_marks_of_the_samples(change: dict[str, Any], mark: str) -> None:
    samples = open_loop()
    for name, value in change.items():
        getattr(samples, name)[np.flatnonzero(samples.window)[:3]] = value
    assert mark in point(samples, opens=10.0).marks


def test_marks_of_the_point() -> None:
    samples = open_loop()
    assert point(samples, opens=10.0, marks=["text prompts"]).marks == ["text prompts"]
    assert point(samples, opens=10.0, look=LOOK.model_copy(update={"short": True})).marks == [
        "client short"
    ]
    short = open_loop(seconds=3.0)
    assert point(short, seconds=3.0, opens=10.0).marks == ["few requests", "short window"]
    samples.cached_tokens[:] = 64
    assert point(samples, opens=10.0, sharing=True).marks == []


def test_the_gaps_interval_covers_though_they_come_by_the_thousand() -> None:
    """Gaps of a request share its pace: 25,000 of them are worth no more than the requests."""
    covered, quantile = [], []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        pace = rng.lognormal(np.log(0.01), 0.4, 250)
        gaps = list(pace[:, None] * np.ones((250, 100)))
        spread = gaps_of(
            samples_of(np.arange(250.0), np.arange(250.0) + 0.1, gaps), SeededRandom(seed)
        )
        assert spread is not None
        for kept, figure, truth in (
            (covered, spread.mean, 0.01 * np.exp(0.08)),
            (quantile, spread.p50, 0.01),
        ):
            assert figure.low is not None and figure.high is not None
            kept.append(figure.low <= truth <= figure.high)
    assert np.mean(covered) >= 0.9 and np.mean(quantile) >= 0.9


# --- rates that keep a goal


def opened(requests: int, done: Sequence[float | None], **more: Any) -> Point:
    """A point that was planned at 99 a second and issued so many in 10 s, with this completed rate
    and its interval."""
    made = point(open_loop(seconds=10.0), seconds=10.0, opens=10.0, rate=99.0)
    rate = (
        Interval.model_validate(dict(zip(("value", "low", "high"), done, strict=True)))
        if done
        else None
    )
    measured = made.figures.model_copy(update={"request_rate": rate})
    return made.model_copy(update={"requests": requests, "figures": measured, **more})


@pytest.mark.parametrize(
    ("requests", "done", "more", "says"),
    [
        (100, (9.9, 9.0, 10.5), {}, (10.0, 10.0, 9.0)),  # the plan's 99 a second are nowhere
        (100, (10.4, 10.2, 10.5), {}, (10.0, 10.0, 10.0)),
        (100, (7.1, 6.5, 7.7), {}, (10.0, 7.1, 6.5)),  # significantly less
        (
            10,
            (0.7, None, None),
            {},
            (1.0, 1.0, None),
        ),  # 7 of 10 ended in the window: as chance has it
        (10, (0.1, None, None), {}, (1.0, 0.1, None)),  # 1 of 10 isn't: at most 5.6
        (10, (0.7, None, None), {"outcomes": {"unfinished": 1}}, (1.0, 0.7, None)),
        (10, (0.7, None, None), {"outcomes": {"stalled": 1}}, (1.0, 1.0, None)),
        (10, (0.0, None, None), {}, (1.0, 0.0, None)),
        (10, (), {}, (1.0, 0.0, None)),
        (
            300,
            (9.9, 9.0, 10.5),
            {"opens": None},
            (99.0, 9.9, 9.0),
        ),  # an import's seconds hold the tail
    ],
)
def test_what_a_point_sustains(
    requests: int,
    done: tuple[float | None, ...],
    more: dict[str, Any],
    says: tuple[float, float, float | None],
) -> None:
    assert figures.sustained(opened(requests, done, **more)) == figures.Sustained(*says)


def test_poissons_upper_ends_are_those_of_the_distribution() -> None:
    for count, high in enumerate(figures.POISSON_HIGH):
        below = sum(np.exp(-high) * high**each / math.factorial(each) for each in range(count + 1))
        assert below == pytest.approx(0.025, rel=1e-3)


# offered, rate, low; share, its low, its high
Asked = tuple[float, float, float | None, float, float, float]


@pytest.mark.parametrize(
    ("line", "most", "says"),
    [
        ([], None, (None, None, None, None)),
        ([(1, 1, 0.9, 1, 0.99, 1)], None, (1, 0.9, None, None)),
        ([(2, 2, 1.9, 0.1, 0, 0.2), (1, 1, 0.9, 0.9, 0.85, 0.96)], None, (None, None, 1, 2)),
        # Chance lets 4 keep it; none lets 1 miss it.
        (
            [
                (3, 3, 2.9, 0.9, 0.8, 0.94),
                (1, 1, 0.9, 1, 1, 1),
                (4, 4, 3, 1, 1, 1),
                (2, 2, 1.9, 0.96, 0.9, 1),
            ],
            None,
            (2, 0.9, 3, 3),
        ),
        (
            [(1, 1, 0.9, 0.9, 0.8, 0.94), (2, 2, 1.9, 1, 1, 1), (3, 3, 2.9, 0.2, 0.1, 0.3)],
            None,
            (2, 1.9, 3, 3),
        ),
        # 12 were offered, 7.1 came back in time: 8 was the most.
        ([(8, 8, 7.8, 1, 1, 1), (12, 7.1, 6.5, 0.97, 0.96, 0.98)], None, (8, 7.8, None, None)),
        ([(101, 87.3, 80, 1, 0.99, 1)], None, (87.3, 80, None, None)),  # surely 80, not 87.3
        # A miss was offered 6, whatever was completed there.
        ([(5, 5, 4.9, 1, 1, 1), (6, 4, 3.8, 0.9, 0.85, 0.94)], None, (5, 4.9, 6, 6)),
        (
            [(5, 5, None, 1, 0.7, 1), (6, 0, None, 0, 0, 0.3)],
            None,
            (5, None, 6, 6),
        ),  # a miss all the same
        ([(5, 0, None, 1, 0.7, 1)], None, (None, None, None, None)),  # not one answer: neither
        # 63 in 40 s of an engine that all at once gave 1.371 [1.219, 1.522].
        (
            [(1.575, 1.575, 1.1, 1, 1, 1), (1.9, 1.3, 1.2, 0.5, 0.4, 0.6)],
            1.522,
            (1.522, 1.1, 1.9, 1.9),
        ),
        ([(1.575, 1.575, 1.1, 1, 1, 1)], 1.522, (1.522, 1.1, None, None)),
        ([(1, 1, 0.9, 1, 1, 1), (1.2, 1.1, 1, 0.5, 0.4, 0.6)], 1.522, (1, 0.9, 1.2, 1.2)),
        ([(1, 1, 0.9, 1, 1, 1)], 1.522, (1, 0.9, None, None)),
        (
            [(1.7, 1.6, 1.5, 0.5, 0.4, 0.6)],
            1.522,
            (None, None, 1.7, 1.7),
        ),  # what was offered and missed is a fact
        ([(5, 0, None, 1, 0.7, 1)], 1.522, (None, None, None, None)),
    ],
)
def test_the_rates_that_keep_a_goal(
    line: list[Asked], most: float | None, says: tuple[float | None, ...]
) -> None:
    told = [
        (
            figures.Sustained(*each[:3]),
            Goal(seconds=1.0, share=each[3], low=each[4], high=each[5], goodput=0.0),
        )
        for each in line
    ]
    assert figures.kept_of(told, 0.95, most) == figures.Kept(*says)


def test_the_most_is_what_everything_at_once_gave() -> None:
    at_once = opened(100, (1.4, 1.2, 1.5), kind="saturation", opens=None)
    assert figures.most_of([]) is None and figures.most_of([opened(9, (1.0, 0.9, 1.1))]) is None
    assert figures.most_of([at_once, opened(9, (1.55, 1.45, 1.6))]) == 1.5
    assert figures.most_of([at_once, opened(9, ()), opened(9, (1.0, None, None))]) == 1.5
    # Ramp and tail cost it more than its interval says: another surely completed more.
    surely = opened(99, (1.6, 1.51, 1.7))
    assert figures.most_of([at_once, surely]) is None
    short = surely.model_copy(update={"client": surely.client.model_copy(update={"short": True})})
    assert figures.most_of([at_once, short]) == 1.5
    cut = at_once.model_copy(update={"outcomes": {"unfinished": 1}})
    barred = at_once.model_copy(update={"client": short.client})
    for nothing in (
        cut,
        barred,
        at_once.model_copy(update={"complete": 0}),
        opened(9, (), kind="saturation"),
        opened(9, (1.4, 1.2, None), kind="saturation"),
    ):
        assert figures.most_of([nothing]) is None
