"""When each request of a point is meant to go: a plan becomes a load.

    saturation   all at 0                     open     warm-up | window | until the window's have ended: Poisson
    single       one after the other          closed   warm-up | window, k at a time

It knows plans, prompts and times; no server. All of it is drawn from the run's seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from penstock.bench.load import Ask, Load
from penstock.bench.method import CLOSED, OPEN, SATURATION, SINGLE, Plan, Settings
from penstock.bench.workload import Prompted

AT_ONCE = 1e-3  # the window of requests that are all meant for second 0
MOST_ASKS = 200_000
STALL = 120.0


def load_of(plan: Plan, settings: Settings, alone: float | None, prompts: Iterator[Prompted], seed: int) -> Load:
    """The asks of a plan. alone: seconds of a request by itself, which the single point told; None before it."""
    if plan.kind == SATURATION:
        asks = [_ask(0.0, next(prompts)) for _ in range(plan.requests)]
        return Load(asks, None, plan.window, STALL, (0.0, AT_ONCE), stream=True)
    if plan.kind == SINGLE:
        asks = [_ask(math.nan, next(prompts)) for _ in range(plan.requests)]
        return Load(asks, 1, plan.window, STALL, (0.0, plan.window), stream=True)
    assert alone is not None and plan.kind in (OPEN, CLOSED)
    begin, end = settings.warm_up, settings.warm_up + plan.window
    until = end + max(settings.drain, 8 * alone)
    if plan.kind == CLOSED:
        slots = plan.concurrency or 1
        count = min(MOST_ASKS, slots + math.ceil(1.2 * slots * until / max(alone, 1e-3)))
        asks = [_ask(math.nan, next(prompts)) for _ in range(count)]
        return Load(asks, slots, until, STALL, (begin, end), stream=True)
    times = poisson(plan.rate or 0.0, until, np.random.default_rng([seed, plan.start, *plan.name.encode()]))
    asks = [_ask(float(time), next(prompts)) for time in times]
    return Load(asks, None, until, STALL, (begin, end), stream=True)


def warm_load(seconds: float, prompts: Iterator[Prompted]) -> Load:
    """A few at a time, for a server that has just started; nobody counts them."""
    asks = [_ask(math.nan, next(prompts)) for _ in range(max(8, math.ceil(20 * seconds)))]
    return Load(asks, 4, seconds, STALL, (0.0, seconds), stream=True)


def poisson(rate: float, until: float, draw: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Times of a Poisson process of `rate` a second on [0, until), at least one."""
    count = int(rate * until + 6 * math.sqrt(rate * until) + 10)
    times = np.cumsum(draw.exponential(1 / rate, min(count, MOST_ASKS)))
    kept = times[times < until]
    return kept if len(kept) else np.zeros(1)


def _ask(intended: float, prompted: Prompted) -> Ask:
    return Ask(intended, prompted.body, prompted.prompt_tokens, prompted.output_tokens)
