"""When each request of a point is meant to go: a plan becomes a load.

    saturation   all at 0                     open     warm-up | window | until the window's have ended: Poisson, with
    single       one after the other                   as many in the window as the rate says
                                              closed   warm-up | window, k at a time

It knows plans, prompts and times; no server. All of it is drawn from the run's seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.bench.point_planner import CLOSED, SATURATION, SINGLE, PointPlan, Settings
from penstock.bench.run_load import Load
from penstock.bench.worker_protocol import PlannedRequest
from penstock.bench.workload import Prompted
from penstock.errors import UsageError

AT_ONCE = 1e-3  # the window of requests that are all meant for second 0
MOST_ASKS = 200_000
DRAIN = 8  # times a request that is alone: one beside many takes longer, and a cut one has missed every goal
ROOM = 1.25  # times what requests took, after their first token, at the point where that was longest
WARM_SLOTS = 4
WARM_RATE = 50  # asks a second that a warm-up has ready


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the server so far. alone: seconds of a request by itself. highest: requests a second at any
    point. loaded: seconds from a first token to the end, on average, at the point where that was longest."""

    alone: float
    highest: float
    loaded: float = 0.0


def load_of(plan: PointPlan, settings: Settings, known: Known | None, prompts: Iterator[Prompted], seed: int) -> Load:
    """Returns the asks of a plan; known: None before the single point. A queue is silent for as long as it is long, so
    only the single point has a time limit for a request's silence."""
    if plan.kind == SATURATION:
        asks = [_ask(0.0, next(prompts)) for _ in range(plan.requests)]
        return Load(asks, None, plan.window, plan.window, (0.0, AT_ONCE))
    if plan.kind == SINGLE:
        asks = [_ask(math.nan, next(prompts)) for _ in range(plan.requests)]
        return Load(asks, 1, plan.window, settings.stall, (0.0, plan.window))
    assert known is not None  # the planner asks for a single point first
    begin, end = plan.opens, plan.opens + plan.window
    until = end + max(settings.drain, DRAIN * known.alone, ROOM * known.loaded)
    if plan.kind == CLOSED:
        slots = plan.concurrency or 1
        until = max(until, end + 2 * slots / known.highest)  # one among many takes as long as all of them do
        count = _bounded(plan, slots + math.ceil(min(1.2 * slots / known.alone, 3 * known.highest) * until))
        asks = [_ask(math.nan, next(prompts)) for _ in range(count)]
        return Load(asks, slots, until, until, (begin, end))
    draw = np.random.default_rng([seed, plan.start, *plan.name.encode()])
    times = arrivals(plan.rate or 0.0, begin, end, until, draw)
    _bounded(plan, len(times))
    asks = [_ask(float(time), next(prompts)) for time in times]
    return Load(asks, None, until, until, (begin, end))


def one_load(settings: Settings, prompts: Iterator[Prompted]) -> Load:
    """Returns a single request, which nobody counts."""
    return Load([_ask(math.nan, next(prompts))], 1, settings.longest, settings.stall, (0.0, settings.longest))


def warm_load(settings: Settings, prompts: Iterator[Prompted]) -> Load:
    """Returns a few at a time, for a server that has just started; nobody counts them."""
    seconds = settings.warm_up
    asks = [_ask(math.nan, next(prompts)) for _ in range(math.ceil(WARM_RATE * seconds))]
    return Load(asks, WARM_SLOTS, seconds, seconds, (0.0, seconds))


def arrivals(rate: float, begin: float, end: float, until: float, draw: np.random.Generator) -> npt.NDArray[np.float64]:
    """Returns times of a Poisson process of `rate` a second on [0, until), given that as many as the rate says fall
    into the window [begin, end): round(rate x length). Given their number, the times of such a process are those of so
    many independent uniform ones, sorted (the order-statistics property: Ross, Stochastic Processes, 1996, theorem
    2.3.1), and what comes before and behind is independent of them. A drawn number would differ from the rate by 10 %
    at 100 requests: by that much luck decided what was offered."""
    window = np.sort(draw.uniform(begin, end, round(rate * (end - begin))))
    window = np.minimum(window, np.nextafter(end, begin))  # a uniform number may be rounded up to the end
    return np.concatenate([poisson(rate, begin, draw), window, end + poisson(rate, until - end, draw)])


def poisson(rate: float, until: float, draw: np.random.Generator) -> npt.NDArray[np.float64]:
    """Returns times of a Poisson process of `rate` a second on [0, until)."""
    times = np.empty(0)
    while not len(times) or times[-1] < until:
        more = draw.exponential(1 / rate, math.ceil(rate * until) + 10)
        times = np.concatenate([times, (times[-1] if len(times) else 0.0) + np.cumsum(more)])
    return times[times < until]


def _bounded(plan: PointPlan, count: int) -> int:
    if not 0 < count <= MOST_ASKS:
        raise UsageError(
            f"the point {plan.name} would be of {count:,} requests, 1 to {MOST_ASKS:,} are sent: give another --window",
            param="window",
        )
    return count


def _ask(intended: float, prompted: Prompted) -> PlannedRequest:
    return PlannedRequest(intended, prompted.body, prompted.prompt_tokens, prompted.output_tokens, prompted.most_output)
