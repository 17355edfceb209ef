"""Fleets: what arrives is shared out and ends, a job is pulled,
replicas come and go with the work."""

from __future__ import annotations

import numpy as np
import pytest
from made_loads import made_load
from made_steps import made_table, step_seconds

from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.simulate.asked_load import AskedLoad
from penstock.simulate.fleet import Fleet
from penstock.simulate.modelled_outputs import END, VOCABULARY
from penstock.simulate.scaling import Scaling
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


def fleet_of(load: AskedLoad, count: int, scaling: Scaling | None = None) -> Fleet:
    return Fleet(load, LIMITS, COSTS, count, scaling=scaling)


@pytest.mark.parametrize(
    "load", [made_load(300, samples=2), made_load(400, rate=300.0)], ids=["job", "arriving"]
)
def test_several_replicas_have_equal_shares(load: AskedLoad) -> None:
    fleet = fleet_of(load, 3)
    outcome = fleet.run()
    assert not np.isnan(outcome.end).any() and (outcome.first <= outcome.end).all()
    assert (outcome.first > load.arrival).all()
    assert outcome.output_tokens == int(load.output.sum())
    taken = [len(replica._numbers) for replica in fleet.replicas]
    assert min(taken) > 0.7 * max(taken)
    assert max(outcome.busy) <= outcome.seconds + 1e-9


def test_a_fork_group_is_shared_out() -> None:
    fleet = fleet_of(made_load(1, samples=400), 4)
    outcome = fleet.run()
    assert outcome.output_tokens == int(fleet.load.output.sum())
    assert [len(replica._numbers) for replica in fleet.replicas] == [1, 1, 1, 1]


def test_twice_the_replicas_do_a_job_in_half_the_time() -> None:
    load = made_load(800, drawn=False)
    one, two = (fleet_of(load, count).run().seconds for count in (1, 2))
    assert two == pytest.approx(one / 2, rel=0.1)


def test_a_job_never_has_more_than_it_has_room_for() -> None:
    fleet = fleet_of(made_load(800), 1)
    most, turn = 0, fleet._turn

    def watched(number: int, coming: float) -> None:
        nonlocal most
        turn(number, coming)
        most = max(most, fleet._open[0])

    fleet._turn = watched  # type: ignore[method-assign]
    fleet.run()
    assert most <= 2 * LIMITS.max_rows


def test_it_stops_when_it_is_told_to() -> None:
    outcome = fleet_of(made_load(600, rate=300.0), 1).run(until=1.0)
    assert np.isnan(outcome.end).any() and not np.isnan(outcome.end).all()
    assert 0.9 < outcome.seconds < 1.2


SCALING = Scaling(least=0, most=3, drain=0.5, cold_start=5.0, idle=20.0)


def test_from_no_replica_and_back() -> None:
    """The first request waits for a cold start; replicas go when nobody has asked for as long as
    `idle`."""
    load = made_load(4, rate=0.01, drawn=False)
    fleet = fleet_of(load, 3, SCALING)
    outcome = fleet.run()
    waited = outcome.first - load.arrival
    assert 5.0 <= waited[0] <= 5.0 + 2 * SCALING.every + step_seconds(1, 100, 100)
    assert {count for _, count in fleet.counts} == {0, 1}
    apart = np.diff(load.arrival)
    cold = 1 + int((apart > 30).sum())
    assert int((waited > 4.9).sum()) == cold >= 2
    # Each time for a cold start, what was asked and the idle time behind it; at the end nobody is
    # waited for.
    assert 25.0 * (cold - 1) + 5.0 <= outcome.up < 30.0 * (cold - 1) + 8.0


def test_more_work_more_replicas() -> None:
    load = made_load(1000, rate=400.0, output=100)
    fleet = fleet_of(load, 3, SCALING)
    outcome = fleet.run()
    assert max(count for _, count in fleet.counts) == 3
    assert outcome.up < 3 * outcome.seconds
    assert not np.isnan(outcome.end).any()


def test_least_replicas_are_there_from_the_beginning() -> None:
    load = made_load(30, rate=10.0)
    scaling = Scaling(least=2, most=3, drain=50.0, cold_start=100.0, idle=20.0)
    outcome = fleet_of(load, 3, scaling).run()
    assert (outcome.first - load.arrival).max() < 1.0
    assert outcome.up == pytest.approx(2 * (outcome.seconds + load.arrival[0]), rel=0.05)
