"""A leap gives what stepping gives: every column, block and count, whatever runs and wherever it
ends."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from penstock.request import Request, SamplingParams
from penstock.schedule.leap import Leaper
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.step import StepPlan, StepTokens

LIMITS = SchedulerConfig(
    num_blocks=300, max_rows=12, max_model_len=400, max_batched_tokens=64, vocab_size=50
)
WORD = 7


def request(number: int, prompt: int, n: int, most: int) -> Request:
    ids = np.full(prompt, number % 50, np.int32)
    return Request(
        request_id=number, prompt=ids.tobytes(), sampling=SamplingParams(n=n, max_tokens=most)
    )


class Loop:
    """A scheduler one step ahead of a device that says the same word for ever."""

    def __init__(self, leaps: bool) -> None:
        self.scheduler, self.leaps = Scheduler(LIMITS), leaps
        self.leaper = Leaper(self.scheduler)
        self.flight: StepPlan | None = None
        self.leapt = 0

    def turn(self, steps: int) -> None:
        """Launches and reads so many steps, or fewer where there is nothing to launch."""
        while steps > 0:
            if self.leaps and self.flight is not None:
                most = min(self.leaper.steps(self.flight), steps)
                if most > 1:
                    self.flight = self.leaper.leap(self.flight, most, WORD)
                    self.leapt += most
                    steps -= most
                    continue
            plan = self.scheduler.plan()
            steps -= 1
            before, self.flight = self.flight, plan
            if before is not None:
                self.scheduler.commit(before, StepTokens(np.full(before.rows.size, WORD, np.int32)))
            self.scheduler.check()


def state_of(loop: Loop) -> dict[str, Any]:
    scheduler, rows = loop.scheduler, loop.scheduler.rows
    names = (
        "state",
        "planned_length",
        "read_length",
        "blocks",
        "last_flight",
        "sent",
        "table",
        "limit",
        "order",
    )
    found = {name: getattr(rows, name).tolist() for name in names}
    found["slots"] = scheduler.slot_token[1:].tolist()  # of the scratch block nothing is read
    found["refs"], found["stack"] = (
        scheduler.pool.refs.tolist(),
        scheduler.pool._stack[: scheduler.pool.free].tolist(),
    )
    found["counts"], found["flight"] = dict(scheduler.counts), None
    if loop.flight is not None:
        flight = loop.flight
        found["flight"] = (
            flight.number,
            flight.rows.tolist(),
            flight.lengths.tolist(),
            flight.group_start.tolist(),
        )
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_leap_is_its_steps(seed: int) -> None:
    rng, stepped, leaping = random.Random(seed), Loop(leaps=False), Loop(leaps=True)
    for number in range(12):
        asked = request(number, rng.randrange(1, 150), rng.choice([1, 1, 3]), rng.randrange(2, 200))
        steps = rng.choice([1, 5, 40, 90])
        for loop in (stepped, leaping):
            loop.scheduler.submit(asked)
            loop.turn(steps)
            loop.scheduler.check()
        assert state_of(leaping) == state_of(stepped)
    for loop in (stepped, leaping):
        loop.turn(2000)
        assert not loop.scheduler.has_work
    assert leaping.leapt > 100


def test_no_leap_where_somebody_waits_or_news_go_up() -> None:
    loop = Loop(leaps=True)
    loop.scheduler.submit(request(0, 20, 12, 300))
    loop.turn(6)
    assert loop.leapt > 0
    assert loop.flight is not None
    loop.scheduler.submit(request(1, 20, 1, 300))  # no row is free: it waits
    assert loop.leaper.steps(loop.flight) == 0
    streamed = Loop(leaps=True)
    asked = request(0, 20, 1, 300)
    asked.stream = True
    streamed.scheduler.submit(asked)
    streamed.turn(20)
    assert streamed.leapt == 0
