"""Which points a run measures, against servers whose crossings are known; and when requests are
meant to go."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from bench_runs import run_of
from hypothesis import given
from hypothesis import settings as drawing
from hypothesis import strategies as st

from penstock.almanac.record import Method
from penstock.bench.point_planner import (
    CLOSED,
    FEWEST,
    NARROW,
    OPEN,
    PLENTY,
    SATURATION,
    SINGLE,
    PointPlan,
    PointResult,
    Settings,
    bracket,
    failed,
    fewer_than_aimed,
    next_plan,
    sides,
    within,
)
from penstock.bench.request_schedule import arrivals, load_of, poisson, warm_load
from penstock.bench.run_folder import RunState
from penstock.bench.worker_protocol import PlannedRequest
from penstock.bench.workload import workload
from penstock.bench.write_record import method_of

GOALS = (0.3, 1.0, 3.0)
HALF = drawing(max_examples=drawing.default.max_examples // 2)  # whole runs are many plans


class Server:
    """Serves `most` requests a second; a goal's first tokens come in time up to its rate. `dies`:
    points that fail."""

    def __init__(
        self, most: float, crossings: dict[float, float], dies: set[str] | None = None
    ) -> None:
        self.most, self.crossings, self.dies = most, crossings, dies or set()

    def measure(self, plan: PointPlan) -> PointResult:
        if plan.name in self.dies:
            return failed(plan, GOALS)
        if plan.kind == OPEN:
            rate = plan.rate or 0.0
            met = {goal: float(rate <= self.crossings[goal]) for goal in GOALS}
            return PointResult(plan, min(rate, self.most), met, met)
        users = plan.concurrency or plan.requests
        met = {goal: float(self.crossings[goal] > 0) for goal in GOALS}
        return PointResult(plan, self.most * users / (users + 8), met, met)


def run(
    settings: Settings, server: Server, found: list[PointResult] | None = None, most: int = 500
) -> list[PointResult]:
    found = list(found or [])
    while (plan := next_plan(settings, found)) is not None and len(found) < most:
        found.append(server.measure(plan))
    assert len(found) < most, "the run does not end"
    return found


rates = st.floats(0.05, 20_000)
shares = st.tuples(*[st.floats(0.02, 1.3)] * 3).map(sorted)


@given(most=rates, shares=shares)
def test_each_crossing_is_found_within_its_width(most: float, shares: list[float]) -> None:
    settings = Settings(goals=GOALS, starts=1, bisections=12)
    server = Server(most, {goal: share * most for goal, share in zip(GOALS, shares, strict=True)})
    found = run(settings, server)
    for goal in GOALS:
        meets, fails = bracket(settings, found, goal) or (math.nan, math.nan)
        assert fails is not None and meets <= server.crossings[goal] < fails
        assert fails - meets <= NARROW * fails * 1.01  # rates have three digits


@HALF
@given(
    most=rates,
    shares=shares,
    bisections=st.integers(0, 4),
    starts=st.integers(1, 4),
    ladder=st.booleans(),
)
def test_a_run_ends_within_its_budget_and_asks_nothing_twice(
    most: float, shares: list[float], bisections: int, starts: int, ladder: bool
) -> None:
    settings = Settings(goals=GOALS, starts=starts, bisections=bisections, ladder=ladder)
    server = Server(most, {goal: share * most for goal, share in zip(GOALS, shares, strict=True)})
    found = run(settings, server)
    keys = [each.plan.key for each in found]
    assert len(set(keys)) == len(keys)
    opened = [each for each in found if each.plan.kind == OPEN and each.plan.start == 0]
    assert len(opened) <= bisections * len(GOALS)
    rungs = [each.plan.concurrency for each in found if each.plan.kind == CLOSED]
    assert rungs == [2 ** (at + 1) for at in range(len(rungs))] and bool(rungs) == ladder
    for start in range(starts):
        names = [each.plan.name for each in found if each.plan.start == start]
        assert names[:2] == [SINGLE, SATURATION]
        assert start == 0 or set(names[2:]) == sides(settings, opened + found[:2])


@HALF
@given(most=rates, shares=shares, cut=st.integers(0, 40))
def test_a_stopped_run_goes_on_with_the_same_plans(
    most: float, shares: list[float], cut: int
) -> None:
    settings = Settings(goals=GOALS, starts=2)
    server = Server(most, {goal: share * most for goal, share in zip(GOALS, shares, strict=True)})
    whole = run(settings, server)
    assert run(settings, server, whole[:cut]) == whole


@HALF
@given(most=rates, shares=shares, data=st.data())
def test_a_point_that_fails_is_not_tried_again_and_the_others_are(
    most: float, shares: list[float], data: st.DataObject
) -> None:
    settings = Settings(goals=GOALS, starts=2)
    crossings = {goal: share * most for goal, share in zip(GOALS, shares, strict=True)}
    names = [each.plan.name for each in run(settings, Server(most, crossings))]
    dies = data.draw(st.sampled_from(sorted(set(names))))
    found = run(settings, Server(most, crossings, {dies}))
    keys = [each.plan.key for each in found]
    assert len(set(keys)) == len(keys)
    lost = [each.plan for each in found if each.failed]
    assert lost and {plan.name for plan in lost} == {dies}
    assert all(plan.kind != OPEN or plan.start == 0 for plan in lost)
    kinds = {each.plan.kind for each in found}
    assert kinds == ({SATURATION, SINGLE} if dies == SINGLE else {SATURATION, SINGLE, CLOSED, OPEN})


def test_a_goal_that_a_single_request_misses_has_no_crossing() -> None:
    settings = Settings(goals=GOALS, starts=1)
    found = run(settings, Server(10.0, {0.3: 0.0, 1.0: 4.0, 3.0: 6.0}))
    assert bracket(settings, found, 0.3) is None and bracket(settings, found, 1.0) is not None
    none = run(settings, Server(10.0, dict.fromkeys(GOALS, 0.0)))
    assert not [each for each in none if each.plan.kind == OPEN]


def test_windows_hold_enough_requests_and_never_none() -> None:
    settings = Settings(goals=GOALS, starts=1)
    for most, least in ((1000.0, settings.window), (4.0, 250.0), (0.001, FEWEST / 0.001)):
        found = run(settings, Server(most, dict.fromkeys(GOALS, most / 2)))
        windows = [
            (each.plan.window, each.plan.rate or 0.0) for each in found if each.plan.kind == OPEN
        ]
        assert windows and all(
            window * rate >= 0.99 * min(1000.0, max(FEWEST, 600 * rate)) for window, rate in windows
        )
        # issued as planned
        assert all(abs(window * rate - round(window * rate)) < 1e-6 for window, rate in windows)
        assert min(window for window, _ in windows) >= 0.9 * least


@given(most=rates, shares=shares, seconds=st.floats(1, 20_000), shape=st.floats(0.01, 20))
def test_a_budget_is_kept_and_the_two_ends_are_measured_all_the_same(
    most: float, shares: list[float], seconds: float, shape: float
) -> None:
    settings = replace(within(seconds), goals=GOALS)
    server = Server(most, {goal: share * most for goal, share in zip(GOALS, shares, strict=True)})
    found: list[PointResult] = []
    while (plan := next_plan(settings, found)) is not None:
        took = shape if plan.kind in (SATURATION, SINGLE) else plan.opens + plan.window
        found.append(replace(server.measure(plan), took=took))
    spent = sum(each.took for each in found if each.plan.kind in (CLOSED, OPEN))
    assert spent < seconds and {SATURATION, SINGLE} <= {each.plan.kind for each in found}
    assert replace(settings, budget=None).window <= 60 and settings.longest >= settings.window


# --- arrivals


def plan_of(kind: str, **more: float | int | None) -> PointPlan:
    return PointPlan(
        **{"name": kind, "kind": kind, "start": 0, "window": 60.0, "opens": 10.0, **more}
    )  # type: ignore[arg-type]


def prompts() -> Iterator[PlannedRequest]:
    return (PlannedRequest(math.nan, b"%d" % number, 5, 7) for number in count())


@pytest.mark.parametrize("rate", [0.5, 3000.0])
def test_arrivals_are_a_poisson_process(rate: float) -> None:
    from scipy import stats

    until = 2000 / rate
    runs = [poisson(rate, until, np.random.default_rng([seed, 1])) for seed in range(100)]
    counts = np.array([len(times) for times in runs])
    assert abs(counts.mean() - 2000) < 4 * (2000 / 100) ** 0.5
    assert 0.6 < counts.var() / 2000 < 1.6  # variance is the mean
    gaps = np.concatenate([np.diff(times, prepend=0.0) for times in runs])
    assert stats.kstest(gaps * rate, "expon").pvalue > 1e-4
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.02
    for times in runs:
        assert (np.diff(times) > 0).all() and times[0] > 0 and times[-1] < until


@pytest.mark.parametrize(
    ("rate", "begin", "length"), [(0.25, 30.0, 40.0), (4.71, 10.0, 21.2), (300.0, 2.0, 8.0)]
)
def test_a_window_holds_as_many_arrivals_as_its_rate_says_and_is_a_poisson_process_given_that(
    rate: float, begin: float, length: float
) -> None:
    """Of a Poisson process given its count k: the times in the window are k independent uniform
    ones (so the count of its first half is binomial, of variance k / 4), before and behind it
    counts are Poisson, and independent of it."""
    from scipy import stats

    end, until, held = begin + length, begin + 3 * length, round(rate * length)
    runs = [
        arrivals(rate, begin, end, until, np.random.default_rng([seed, 2])) for seed in range(400)
    ]
    windows = [times[(times >= begin) & (times < end)] for times in runs]
    assert {len(each) for each in windows} == {held}
    places = np.concatenate([(each - begin) / length for each in windows])
    assert stats.kstest(places, "uniform").pvalue > 1e-4
    halves = np.array([(each < begin + length / 2).sum() for each in windows])
    assert (
        abs(halves.mean() - held / 2) < 4 * (held / 4 / 400) ** 0.5
        and 0.7 < halves.var() / (held / 4) < 1.35
    )
    for part, low, high in (("before", 0.0, begin), ("behind", end, until)):
        counts = np.array([((times >= low) & (times < high)).sum() for times in runs])
        expected = rate * (high - low)
        assert abs(counts.mean() - expected) < 4 * (expected / 400) ** 0.5, part
        assert 0.7 < counts.var() / expected < 1.35, part
        assert abs(np.corrcoef(counts, halves)[0, 1]) < 0.2, part
    for times in runs:
        assert (np.diff(times) >= 0).all() and times[0] >= 0 and times[-1] < until


def test_the_load_of_each_kind() -> None:
    at_once = load_of(plan_of(SATURATION, requests=50, window=600.0, opens=0.0), 9.0, prompts(), 0)
    assert (
        {ask.intended for ask in at_once.asks} == {0.0}
        and len(at_once.asks) == 50
        and at_once.closed is None
    )
    assert at_once.stall == at_once.stop_after == 600.0  # a queue may be silent until its turn
    single = load_of(plan_of(SINGLE, requests=5, concurrency=1, opens=0.0), 9.0, prompts(), 0)
    assert (single.closed, single.stall, single.window, len(single.asks)) == (
        1,
        9.0,
        (0.0, 60.0),
        5,
    )
    assert all(math.isnan(ask.intended) for ask in single.asks)
    opened = load_of(plan_of(OPEN, rate=8.0, drain=48.0), 9.0, prompts(), 0)
    assert (opened.window, opened.stop_after, opened.stall) == ((10.0, 70.0), 118.0, 118.0)
    # they go on arriving until the window's have ended
    assert 8 * 118 * 0.8 < len(opened.asks) < 8 * 118 * 1.2
    closed = load_of(plan_of(CLOSED, concurrency=4, requests=100), 9.0, prompts(), 0)
    assert closed.closed == 4 and len(closed.asks) == 100
    assert len({ask.body for ask in opened.asks}) == len(opened.asks)
    assert {(ask.asked_prompt, ask.asked_output) for ask in opened.asks} == {(5, 7)}
    assert warm_load(Settings(), prompts()).stop_after == Settings().warm_up


def test_a_point_waits_for_its_requests_and_has_as_many_as_its_users_can_send() -> None:
    """A request alone takes 6 s; four at a time make 0.5 a second; at the point before one took 80
    s."""
    settings, slow = Settings(goals=GOALS, starts=1, bisections=0), dict.fromkeys(GOALS, 1.0)
    single = PointResult(
        PointPlan(SINGLE, SINGLE, 0, 60.0, concurrency=1), 1 / 6, slow, slow, loaded=5.0
    )
    rush = PointResult(PointPlan(SATURATION, SATURATION, 0, 60.0), 0.5, slow, slow, loaded=80.0)
    rung = next_plan(settings, [single, rush])
    assert rung is not None and (rung.concurrency, rung.drain) == (2, 1.25 * 80.0)
    assert rung.requests >= 2 * (rung.opens + rung.window + rung.drain) / 6
    quick = next_plan(settings, [single, replace(rush, loaded=0.0)])
    assert quick is not None and quick.drain == pytest.approx(8 * 6.0)


def test_the_method_in_a_record_is_what_was_done() -> None:
    """All of the full method on a server of 4 requests a second; then as much of it as there was
    time for; then on one so slow that a window of ten minutes sees no 1,000 requests."""
    asked = replace(run_of(Path("out")), settings=Settings(goals=GOALS, budget=PLENTY))
    settings = replace(asked.settings, budget=None)

    def told(done: list[PointResult]) -> Method:
        points = [SimpleNamespace(result=each) for each in done]
        return method_of(
            asked,
            workload("8x4"),
            cast(RunState, SimpleNamespace(points=points, found=done, machines={})),
        )

    whole = run(settings, Server(4.0, dict.fromkeys(GOALS, 3.0)))
    assert (told(whole).starts, told(whole).short) == (3, False)
    first = [each for each in whole if each.plan.start == 0]
    assert (told(first).starts, told(first).short) == (1, True)
    assert (told(first[:3]).starts, told(first[:3]).short) == (1, True) and told([]).short
    slow = run(settings, Server(1.0, dict.fromkeys(GOALS, 0.75)))
    assert (told(slow).starts, told(slow).short) == (3, True)
    assert [fewer_than_aimed(settings, each.plan) for each in slow] == [
        each.plan.kind == OPEN for each in slow
    ]
