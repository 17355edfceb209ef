"""A modelled replica turns as the engine does,
and its shortcuts change nothing that comes of it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from made_loads import made_load
from made_steps import made_table, step_seconds

from penstock.engine.engine import Engine
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.step import Flight, StepPlan, StepTokens
from penstock.simulate.asked_load import AskedLoad
from penstock.simulate.fleet import Fleet, FleetOutcome
from penstock.simulate.modelled_outputs import END, VOCABULARY
from penstock.simulate.modelled_replica import ModelledDevice, ModelledReplica
from penstock.simulate.step_costs import StepCosts

COSTS = StepCosts(made_table(), "made", "measure more")
LIMITS = SchedulerConfig(
    num_blocks=4096,
    max_rows=64,
    max_model_len=2048,
    max_batched_tokens=512,
    mask_slots=1,
    vocab_size=VOCABULARY,
    eos_token_ids=(END,),
)
LOADS: dict[str, tuple[AskedLoad, SchedulerConfig]] = {
    "a job": (made_load(150), LIMITS),
    "samples of few prompts": (made_load(6, samples=40, limit=300), LIMITS),
    "requests that arrive": (made_load(120, rate=30.0, limit=300), LIMITS),
    "few at a time": (made_load(12, rate=0.5, output=90), LIMITS),
    "too little KV": (made_load(80, output=200, limit=900), replace(LIMITS, num_blocks=300)),
    "rows ahead of their room": (
        made_load(60, prompt=32, output=400, drawn=False, limit=400),
        replace(LIMITS, num_blocks=300, ridge_rows=200),
    ),
    "a prompt's beginning in common": (made_load(90, rate=40.0, shared=64), LIMITS),
}


def run(load: AskedLoad, limits: SchedulerConfig, **how: Any) -> FleetOutcome:
    return Fleet(load, limits, COSTS, **how).run()


@pytest.mark.parametrize("name", LOADS)
def test_shortcuts_change_nothing(name: str) -> None:
    load, limits = LOADS[name]
    short, long = run(load, limits), run(load, limits, shortcuts=False)
    assert not np.isnan(long.end).any()
    assert short.first.tolist() == pytest.approx(long.first.tolist(), rel=1e-12)
    assert short.end.tolist() == pytest.approx(long.end.tolist(), rel=1e-12)
    assert (short.steps, short.output_tokens) == (long.steps, long.output_tokens)
    assert long.output_tokens == int(np.minimum(load.output, load.limit.max() or 10**6).sum())
    assert short.preemptions == long.preemptions and (short.preemptions > 0) == (
        name in ("too little KV", "rows ahead of their room")
    )
    assert short.busy == pytest.approx(long.busy)


def test_rows_join_that_will_be_preempted_where_steps_read_weights() -> None:
    """11 rows of 60 fit to their ends, and a step of 200 computes as long as it reads."""
    load, limits = LOADS["rows ahead of their room"]
    ahead, strict, few = (run(load, replace(limits, ridge_rows=n)) for n in (200, 0, 2))
    assert ahead.output_tokens == strict.output_tokens == 60 * 400
    assert ahead.end.max() < 0.8 * strict.end.max() and ahead.preemptions > strict.preemptions
    assert (few.steps, few.preemptions) == (strict.steps, strict.preemptions)


class ModelledRunner:
    """The device as an engine's runner; it keeps what each step was of."""

    def __init__(self, load: AskedLoad) -> None:
        self.device, self.seen = ModelledDevice(load, LIMITS.max_rows), list[tuple[int, float]]()

    def launch(self, plan: StepPlan) -> Flight:
        self.seen.append((plan.rows.size, COSTS.seconds(plan)))
        return Read(self.device.launch(plan)[0])


class Read:
    def __init__(self, tokens: StepTokens) -> None:
        self.tokens = tokens

    def ready(self) -> bool:
        return True

    def fetch(self) -> StepTokens:
        return self.tokens


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_it_launches_the_steps_that_an_engine_does(ahead: int) -> None:
    load = made_load(100, samples=2, limit=200)
    runner = ModelledRunner(load)
    engine = Engine(Scheduler(replace(LIMITS, prefix_caching=False)), runner, steps_ahead=ahead)  # type: ignore[arg-type]
    replica = ModelledReplica(
        load, replace(LIMITS, prefix_caching=False), COSTS, ahead, shortcuts=False
    )
    for number in range(len(load)):
        engine.submit(load.request(number, number))
        replica.submit(load, number, 0.0)
    seen, launched = deque[tuple[int, float]](), replica.device.launch

    def launch(plan: StepPlan) -> Any:
        seen.append((plan.rows.size, COSTS.seconds(plan)))
        return launched(plan)

    replica.device.launch = launch  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
    while replica.has_work:
        replica.turn()
    assert list(seen) == runner.seen and len(seen) > 50
    assert replica.now == pytest.approx(sum(seconds for _, seconds in runner.seen))


def test_a_request_by_itself_takes_its_steps() -> None:
    """One step of prompt beside its first token, then a step a token; the first is read when the
    second is launched."""
    load = made_load(1, prompt=101, output=40, drawn=False, rate=1.0)
    outcome = run(load, LIMITS)
    first = step_seconds(1, 100, 100, 100 * 101 / 2)
    rest = sum(step_seconds(1, 100 + n) for n in range(1, 40))
    arrival = float(load.arrival[0])
    assert outcome.first[0] - arrival == pytest.approx(first, rel=0.02)
    assert outcome.end[0] - arrival == pytest.approx(first + rest, rel=0.01)


def test_ends_come_where_the_load_says_or_at_the_limit() -> None:
    load = made_load(60, output=100, limit=120)
    outcome = run(load, LIMITS)
    assert outcome.output_tokens == int(np.minimum(load.output, 120).sum()) < int(load.output.sum())
