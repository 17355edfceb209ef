"""When each request of a point is meant to go: a plan becomes a load.

    saturation   all at 0                     open     warm-up | window | until the window's have
    ended: Poisson, with
    single       one after the other                   as many in the window as the rate says
                                              closed   warm-up | window, k at a time

It knows plans, prompts and times; no server. All of it is drawn from the run's seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.bench.point_planner import OPEN, SATURATION, SINGLE, PointPlan, Settings
from penstock.bench.worker_protocol import Load, PlannedRequest
from penstock.errors import UsageError

AT_ONCE = 1e-3  # the window of requests that are all meant for second 0
MOST_ASKS = 200_000
WARM_SLOTS = 4
WARM_RATE = 50  # asks a second that a warm-up has ready


def load_of(plan: PointPlan, stall: float, prompts: Iterator[PlannedRequest], seed: int) -> Load:
    """Returns the asks of a plan. stall: how long a request may be silent, of the single point
    alone: a queue is silent for as long as it is long. Raises UsageError for more than are sent."""
    end = plan.opens + plan.window
    until = end + plan.drain
    times = [0.0 if plan.kind == SATURATION else math.nan] * plan.requests
    if plan.kind == OPEN:
        draw = np.random.default_rng([seed, plan.start, *plan.name.encode()])
        times = arrivals(plan.rate or 0.0, plan.opens, end, until, draw).tolist()
    if not 0 < len(times) <= MOST_ASKS:
        raise UsageError(
            f"the point {plan.name} would be of {len(times):,} requests, 1 to {MOST_ASKS:,} are"
            " sent: give another --window or --at-once",
            param="window",
        )
    asks = [msgspec.structs.replace(next(prompts), intended=time) for time in times]
    window = (0.0, AT_ONCE) if plan.kind == SATURATION else (plan.opens, end)
    return Load(asks, plan.concurrency, until, stall if plan.kind == SINGLE else until, window)


def one_load(settings: Settings, prompts: Iterator[PlannedRequest]) -> Load:
    """Returns a single request, which nobody counts."""
    return Load([next(prompts)], 1, settings.longest, settings.stall, (0.0, settings.longest))


def warm_load(settings: Settings, prompts: Iterator[PlannedRequest]) -> Load:
    """Returns a few at a time, for a server that has just started; nobody counts them."""
    seconds = settings.warm_up
    asks = list(islice(prompts, math.ceil(WARM_RATE * seconds)))
    return Load(asks, WARM_SLOTS, seconds, seconds, (0.0, seconds))


def arrivals(
    rate: float, begin: float, end: float, until: float, draw: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Returns times of a Poisson process of `rate` a second on [0, until), given that as many as
    the rate says fall into the window [begin, end): round(rate x length). Given their number, the
    times of such a process are those of so many independent uniform ones, sorted (the
    order-statistics property: Ross, Stochastic Processes, 1996, theorem 2.3.1), and what comes
    before and behind is independent of them. A drawn number would differ from the rate by 10 % at
    100 requests: by that much luck decided what was offered."""
    window = np.sort(draw.uniform(begin, end, round(rate * (end - begin))))
    # a uniform number may be rounded up to the end
    window = np.minimum(window, np.nextafter(end, begin))
    return np.concatenate(
        [poisson(rate, begin, draw), window, end + poisson(rate, until - end, draw)]
    )


def poisson(rate: float, until: float, draw: np.random.Generator) -> npt.NDArray[np.float64]:
    """Returns times of a Poisson process of `rate` a second on [0, until)."""
    times = np.empty(0)
    while not len(times) or times[-1] < until:
        more = draw.exponential(1 / rate, math.ceil(rate * until) + 10)
        times = np.concatenate([times, (times[-1] if len(times) else 0.0) + np.cumsum(more)])
    return times[times < until]
