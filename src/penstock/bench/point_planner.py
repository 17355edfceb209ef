"""Decides which load levels (points) a run measures. The most important come first, because the
list is cut when time is short. A crossing is the highest request rate at which a latency goal is
still met; it is bracketed between a rate that meets the latency goal and one that fails it.

    start 0   single, saturation, open (for each goal, halves of [meets | fails]), closed 2, 4, 8,
              ...
    start 1+  single, saturation, the open load levels on both sides of each crossing, again

A pure function of the results so far, so a stopped run continues by calling it again. Knows no
server and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.almanac.record import EDITION_STARTS, EDITION_WINDOW

SATURATION, SINGLE, CLOSED, OPEN = "saturation", "single", "closed", "open"
# doubling the concurrency ends when it raises the request rate by less than this factor
GROWS = 1.05
# the search for a latency goal's highest rate ends when the meeting and the failing rate are this
# close, as a share of the failing rate
NARROW = 0.1
# settings of which a smaller value makes a short run
COUNTED = (
    "warm_up",
    "window",
    "longest",
    "enough",
    "at_once",
    "alone",
    "bisections",
)
PLENTY = 5400.0  # seconds of a workload shape that the full method needs
GAIN = 4  # assumed throughput of many requests at once over that of one request; a low guess
# share of a short run's time for the two extreme load levels (single and saturation) together
END_SHARE = 0.7
STEADY = 3  # a steady window lasts at least this many times a single request
FEWEST = 10  # least number of requests in an open-loop window, however long that takes
# first open-loop rate as a share of the saturation rate; near the saturation rate queues take
# longest to become steady
BEGIN = 0.75
# factor to the next rate, if a latency goal is met at a rate above the saturation rate
STRIDE = 1.5
# the window opens after this many times a request's duration, when the number of running requests
# is steady
SETTLES = 1.5
# most seconds after the window until its requests are cut off, over a single request's duration:
# among many, requests take longer, and a cut request counts as a missed latency goal
DRAIN = 8
# the same time, over the longest mean time from first token to end that a load level has had
ROOM = 1.25


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run. Times in seconds.

    goals: times within which the first token should come. quantile: the share of requests whose
    first token must come within a goal. window: a load level's shortest window. longest: a load
    level's longest window, however few its requests. drain: least time after the window until its
    requests are cut off; more if requests take longer. enough: requests that a load level near a
    goal's highest rate (crossing) should have. at_once: sequences of the saturation load level;
    with n samples a request, at_once / n requests. alone: requests of the single load level.
    bisections: open-loop load levels per latency goal. ladder: also measure 2, 4, 8, ... requests
    at a time. stall: longest time in which a server with open requests may send nothing. budget:
    seconds for the whole workload shape, server starts included; None: no limit. edition: the
    method of the almanac's editions, whose server starts are shared by all workload shapes and
    don't count for the budget.
    """

    goals: tuple[float, ...] = (0.3, 1.0, 3.0)
    quantile: float = 0.95
    starts: int = 3
    warm_up: float = 10.0
    window: float = 60.0
    longest: float = 600.0
    drain: float = 30.0
    enough: int = 1000
    at_once: int = 1000
    alone: int = 20
    bisections: int = 5
    ladder: bool = True
    stall: float = 300.0
    budget: float | None = None
    edition: bool = False

    @property
    def hurried(self) -> bool:
        """Returns True if the time budget is too short for the full method."""
        return self.budget is not None and self.budget < PLENTY

    def of_samples(self, n: int) -> Settings:
        """Returns the settings for requests of n samples each; an edition's own number is larger."""
        at_once = SAMPLED if self.edition and self.at_once == EDITION.at_once else self.at_once
        return self if n == 1 else replace(self, at_once=max(FEWEST, at_once // n))

    def below_full(self, *, starts: bool) -> bool:
        """Returns True if any setting is below the full method's, so that results are less
        reliable. starts: True if the number of server starts is checked too."""
        full = Settings()
        counted = [*COUNTED, "starts"] if starts else COUNTED
        return self.hurried or any(getattr(self, name) < getattr(full, name) for name in counted)

    @property
    def keeps_edition(self) -> bool:
        """Returns True for an edition of which no setting is below the edition's method, and with
        as many requests at once."""
        same = self.edition and self.at_once == EDITION.at_once
        return same and not any(
            getattr(self, name) < getattr(EDITION, name) for name in [*COUNTED, "starts"]
        )


# settings of a short run (option `--short`)
SHORT = Settings(
    starts=1,
    warm_up=2.0,
    window=10.0,
    longest=60.0,
    drain=5.0,
    enough=100,
    at_once=200,
    alone=5,
    bisections=2,
)


# settings of the almanac's editions (option `--edition`); at most 8 minutes for a workload shape
EDITION = Settings(
    starts=EDITION_STARTS,
    warm_up=5.0,
    window=EDITION_WINDOW,
    longest=40.0,
    drain=5.0,
    enough=200,
    alone=5,
    bisections=2,
    ladder=False,
    budget=450.0,
    edition=True,
)
SAMPLED = 4096  # sequences of an edition's saturation load level with several samples
# shares of an edition's time that its single and its saturation load level may take in each start
EDITION_SHARES = {SINGLE: 0.05, SATURATION: 0.27}


def within(seconds: float) -> Settings:
    """Returns the settings for a workload shape in this many seconds: from the full method in an
    hour and a half down to the fewest load levels in four minutes."""
    full = Settings()

    def part(least: float, whole: float) -> float:
        return round(min(whole, max(least, whole * seconds / PLENTY)), 1)

    return Settings(
        starts=full.starts if seconds >= PLENTY else 1,
        warm_up=part(2, full.warm_up),
        window=part(8, full.window),
        longest=part(40, full.longest),
        drain=part(5, full.drain),
        enough=int(part(100, full.enough)),
        at_once=int(part(64, full.at_once)),
        alone=int(part(4, full.alone)),
        bisections=int(part(2, full.bisections)),
        budget=seconds,
    )


@dataclass(frozen=True, slots=True)
class PointPlan:
    """The plan of a load level (point) on one start of the server. requests: most requests to send;
    0: as many as the rate gives. opens: seconds until the window opens. window: its seconds. drain:
    seconds after the window until its requests are cut off.
    """

    name: str
    kind: str
    start: int
    window: float
    rate: float | None = None
    concurrency: int | None = None
    requests: int = 0
    opens: float = 0.0
    drain: float = 0.0

    @property
    def key(self) -> str:
        """Returns the name of the file with the load level's result."""
        return f"{self.name}.{self.start}"


def fewer_than_aimed(settings: Settings, plan: PointPlan) -> bool:
    """Returns True if an open-loop load level has fewer than `enough` requests because its window
    is limited to `longest` seconds. Half a request of difference is ignored."""
    return plan.kind == OPEN and (plan.rate or 0.0) * plan.window < settings.enough - 0.5


@dataclass(frozen=True, slots=True)
class PointResult:
    """The result of a planned load level, as the planner needs it. met: latency goal -> share of
    requests whose first token came within it. most: goal -> upper end of that share's 95 %
    interval. failed: the load level could not be measured; it is not tried again, and no higher
    rate is tried. took: seconds that it took, preparation included. loaded: mean seconds from a
    first token to the end.
    """

    plan: PointPlan
    request_rate: float
    met: dict[float, float]
    most: dict[float, float]
    failed: bool = False
    took: float = 0.0
    loaded: float = 0.0


def failed(plan: PointPlan, goals: Sequence[float], took: float = 0.0) -> PointResult:
    return PointResult(plan, 0.0, dict.fromkeys(goals, 0.0), dict.fromkeys(goals, 0.0), True, took)


def next_plan(settings: Settings, found: Sequence[PointResult]) -> PointPlan | None:
    """Returns the next load level, or None when the run is complete."""
    for start in range(settings.starts):
        done = [each for each in found if each.plan.start == start]
        plan = _next_of(settings, start, done, [each for each in found if each.plan.start == 0])
        if plan is not None and _fits(settings, plan, found):
            return plan
        if plan is not None and not settings.edition:
            return None
    return None


def _fits(settings: Settings, plan: PointPlan, found: Sequence[PointResult]) -> bool:
    """Returns True if the budget has time for the load level. The time after the window is assumed
    to be as long as the time before it, in an edition as long as it may be. The single and the
    saturation load level are always measured."""
    if settings.budget is None or plan.kind in (SATURATION, SINGLE):
        return True
    # an edition keeps time for its later starts
    until = settings.budget * ((plan.start + 1) / settings.starts if settings.edition else 1)
    after = plan.drain if settings.edition else plan.opens
    return sum(each.took for each in found) + plan.opens + plan.window + after < until


def _alone(done: Sequence[PointResult]) -> float:
    """Returns the duration of a request without others in seconds, from the rate of the single
    load level."""
    rate = next((each.request_rate for each in done if each.plan.kind == SINGLE), 0.0)
    return 1 / rate if rate > 0 else 0.0


def _next_of(
    settings: Settings, start: int, done: Sequence[PointResult], first: Sequence[PointResult]
) -> PointPlan | None:
    kinds = {each.plan.kind: each for each in done}
    if SINGLE not in kinds:
        window = _end_window(settings, SINGLE)
        return PointPlan(SINGLE, SINGLE, start, window, concurrency=1, requests=settings.alone)
    if SATURATION not in kinds:
        before = next((each.plan for each in first if each.plan.kind == SATURATION), None)
        return (
            replace(before, start=start) if before is not None else _at_once(settings, _alone(done))
        )
    if kinds[SINGLE].failed:
        return None  # the duration of a single request is unknown
    if start == 0:
        return _bisect(settings, done) or (_rung(settings, done) if settings.ladder else None)
    again = [each.plan for each in first if each.plan.name in sides(settings, first)]
    measured = {each.plan.name for each in done}
    left = [plan for plan in again if plan.name not in measured]
    return replace(left[0], start=start) if left else None


def _at_once(settings: Settings, alone: float) -> PointPlan:
    """Plans the saturation load level. With little time it has fewer requests: as many as end in
    half its time if the server is GAIN times as fast with many requests as with one. (Requests that
    do not end give no rate.) An edition sends all: its engines are compared at the same number."""
    window, requests = _end_window(settings, SATURATION), settings.at_once
    if settings.hurried and not settings.edition and alone > 0:
        requests = min(requests, max(FEWEST, int(GAIN * window / 2 / alone)))
    return PointPlan(SATURATION, SATURATION, 0, window, requests=requests)


def _end_window(settings: Settings, kind: str) -> float:
    """Returns the seconds that the single or the saturation load level may take."""
    if settings.edition and settings.budget is not None:
        return EDITION_SHARES[kind] * settings.budget
    return max(settings.longest, END_SHARE * (settings.budget or 0.0))


# --- the ladder: closed loops with 2, 4, 8, ... requests at a time


def _rung(settings: Settings, done: Sequence[PointResult]) -> PointPlan | None:
    """Plans the next closed-loop load level: 2, 4, 8, ... requests at a time, until more of them
    raise the rate no further or all would run at once."""
    rungs = sorted(
        (each for each in done if each.plan.kind in (SINGLE, CLOSED)),
        key=lambda e: e.plan.concurrency or 1,
    )
    if len(rungs) > 1 and rungs[-1].request_rate < GROWS * rungs[-2].request_rate:
        # more requests at a time don't raise the rate (a failed load level has a rate of 0)
        return None
    concurrency = 2 * (rungs[-1].plan.concurrency or 1)
    if concurrency >= settings.at_once:
        return None
    alone = _alone(done)
    # seconds of one request at this concurrency, if the request rate stays as it was
    takes = concurrency / rungs[-1].request_rate
    window, opens = max(settings.window, STEADY * alone, takes), max(settings.warm_up, alone, takes)
    highest = max(each.request_rate for each in done)
    # if all run together, one request takes as long as all of them
    drain = max(_drain(settings, done), 2 * concurrency / highest)
    # upper bound of the request rate, per second
    most = min(1.2 * concurrency / max(alone, 1e-4), 3 * highest)
    requests = concurrency + math.ceil(most * (opens + window + drain))
    return PointPlan(
        f"{CLOSED}-{concurrency}",
        CLOSED,
        0,
        window,
        None,
        concurrency,
        requests,
        opens=opens,
        drain=drain,
    )


def _drain(settings: Settings, done: Sequence[PointResult]) -> float:
    return max(settings.drain, DRAIN * _alone(done), ROOM * max(each.loaded for each in done))


# --- crossings: the highest request rates that meet the latency goals


def bracket(
    settings: Settings, done: Sequence[PointResult], goal: float
) -> tuple[float, float | None] | None:
    """Returns (highest rate that meets the latency goal, lowest rate that fails it, or None if none
    failed). Rates above a failing one are ignored, even if they meet the goal. Returns None if the
    single load level misses the goal with 95 % confidence: then no rate can meet it. (A short run
    has only four single requests; one late one proves nothing.)
    """
    single = next((each for each in done if each.plan.kind == SINGLE), None)
    if single is None or single.most[goal] < settings.quantile:
        return None
    opened = [
        (each.plan.rate or 0.0, each.met[goal] >= settings.quantile)
        for each in done
        if each.plan.kind == OPEN
    ]
    fails = min((rate for rate, met in opened if not met), default=None)
    meets = max(
        (rate for rate, met in opened if met and (fails is None or rate < fails)), default=0.0
    )
    return meets, fails


def _bisect(settings: Settings, done: Sequence[PointResult]) -> PointPlan | None:
    """Plans the next open-loop rate: the middle between the rate that meets a latency goal and the
    rate that fails it, for the first goal where they are not close yet, the loosest goal first.
    Returns None once all bisections are used up."""
    if sum(each.plan.kind == OPEN for each in done) >= settings.bisections * len(settings.goals):
        return None
    highest = _digits(max(each.request_rate for each in done))
    for goal in sorted(settings.goals, reverse=True):
        pair = bracket(settings, done, goal)
        if pair is None:
            continue
        meets, fails = pair
        if fails is None:
            higher = (
                BEGIN * highest if not meets else highest if meets < highest else STRIDE * meets
            )
            return _open(settings, higher, done)
        if fails - meets > NARROW * fails:
            return _open(settings, (meets + fails) / 2, done)
    return None


def _open(settings: Settings, rate: float, done: Sequence[PointResult]) -> PointPlan:
    """Plans Poisson arrivals at a rate. The window is as long as `enough` requests take, within its
    limits, and has a whole number of requests, so that its rate is exactly the planned one. It
    opens once the number of running requests should have become steady.
    """
    rate, alone = _digits(rate), _alone(done)
    wanted = _whole(max(settings.enough, rate * settings.window))
    least, most = _whole(max(FEWEST, rate * STEADY * alone)), math.floor(rate * settings.longest)
    window = max(min(wanted, most), least) / rate
    opens = max(settings.warm_up, alone, min(_loaded(done, rate), settings.longest))
    return PointPlan(
        f"{OPEN}-{rate:g}", OPEN, 0, window, rate, opens=opens, drain=_drain(settings, done)
    )


def _whole(requests: float) -> int:
    """Rounds up, ignoring the rounding error of a product of floats."""
    return math.ceil(requests - 1e-6)


def _digits(rate: float) -> float:
    """Rounds to the three digits used in a load level's name."""
    return float(f"{rate:.3g}")


def _loaded(done: Sequence[PointResult], rate: float) -> float:
    """Returns an upper bound of the seconds from a request's first token to its end at a request
    rate; 0: unknown. With N running requests the time is assumed to be base + slope x N, a line
    through the measured times of the single and the saturation load level. N is the rate times this
    time (Little's law). The bound is never above the time measured at a higher rate or at
    saturation.
    """
    single, whole = (
        next((each for each in done if each.plan.kind == kind and not each.failed), None)
        for kind in (SINGLE, SATURATION)
    )
    bounds = [each.loaded for each in done if not each.failed and (each.plan.rate or 0.0) >= rate]
    if single is None or whole is None:
        return min(bounds, default=0.0)
    flying = whole.request_rate * whole.loaded
    if flying > 1:
        slope = (whole.loaded - single.loaded) / (flying - 1)
        base = single.loaded - slope
        if base > 0 and 0 < slope * rate < 1:
            bounds.append(SETTLES * base / (1 - slope * rate))
    return min([*bounds, whole.loaded])


def sides(settings: Settings, done: Sequence[PointResult]) -> set[str]:
    """Returns the names of the open-loop load levels on both sides of each latency goal's highest
    rate."""
    names: set[str] = set()
    for goal in settings.goals:
        pair = bracket(settings, done, goal)
        for each in done:
            if (
                pair is not None
                and each.plan.kind == OPEN
                and each.plan.rate in pair
                and not each.failed
            ):
                names.add(each.plan.name)
    return names
