"""Plans when each request is sent. Turns the plan of a point (one load level) into a load: a list
of requests with their send times.

    saturation   all at 0
    single       one after the other
    open         warm-up | window | until the window's requests have ended: Poisson, with as many
                 in the window as the rate says
    closed       warm-up | window, k at a time

Knows plans, prompts and times; no server. All random numbers come from the run's seed.
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

# seconds: length of the window that counts a load whose requests are all sent at second 0
AT_ONCE = 1e-3
MOST_ASKS = 200_000
WARM_SLOTS = 4
WARM_RATE = 50  # requests prepared per second of a closed-loop warm-up


def load_of(plan: PointPlan, stall: float, prompts: Iterator[PlannedRequest], seed: int) -> Load:
    """Returns the load of a planned load level. stall: most seconds between two events of a
    request; applied to the single load level only, because a queued request is silent as long as it
    waits. Raises UsageError for more than MOST_ASKS requests.
    """
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
    """Returns a load of a single request, which counts for no figure."""
    return Load([next(prompts)], 1, settings.longest, settings.stall, (0.0, settings.longest))


def warm_load(settings: Settings, prompts: Iterator[PlannedRequest]) -> Load:
    """Returns a load of a few requests at a time that warms up a new server; it counts for no
    figure."""
    seconds = settings.warm_up
    asks = list(islice(prompts, math.ceil(WARM_RATE * seconds)))
    return Load(asks, WARM_SLOTS, seconds, seconds, (0.0, seconds))


def arrivals(
    rate: float, begin: float, end: float, until: float, draw: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Returns times of a Poisson process of `rate` a second on [0, until), given that round(rate x
    length) of them fall into the window [begin, end). Given their number, such times are sorted
    independent uniform times (the order-statistics property: Ross, Stochastic Processes, 1996,
    theorem 2.3.1), independent of the times before and after. A random number would vary by 10 % at
    100 requests, and so would the offered rate.
    """
    window = np.sort(draw.uniform(begin, end, round(rate * (end - begin))))
    # rounding may give a time equal to the end
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
