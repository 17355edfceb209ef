"""After logits that were not finite nothing of the row's is found in the prefix tree, and its
blocks come back."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.request import Request, SamplingParams
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.step import BAD_LOGITS, StepPlan, StepTokens

PROMPT = list(range(10, 60))  # three full blocks


def _scheduler(**knobs: object) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            num_blocks=64,
            max_rows=8,
            max_model_len=256,
            max_batched_tokens=256,
            vocab_size=200,
            **knobs,
        )
    )  # type: ignore[arg-type]


def _submit(scheduler: Scheduler, number: int, prompt: list[int], **params: object) -> None:
    sampling = SamplingParams(**{"max_tokens": 60, "seed": 1, **params})  # type: ignore[arg-type]
    scheduler.submit(
        Request(request_id=number, prompt=np.array(prompt, np.int32).tobytes(), sampling=sampling)
    )


def _step(scheduler: Scheduler, bad: bool = False) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    _read(scheduler, plan, bad)
    scheduler.check()
    return plan


def _read(scheduler: Scheduler, plan: StepPlan, bad: bool = False) -> list[int]:
    tokens = np.where(bad, BAD_LOGITS, 100 + plan.lengths % 50).astype(np.int32)
    return scheduler.commit(plan, StepTokens(tokens, None, None)).finish.tolist()


def _settle(scheduler: Scheduler) -> None:
    """Runs what is left; then nothing may be held."""
    for _ in range(100):
        if not scheduler.has_work:
            break
        plan = scheduler.plan()
        if plan is not None:
            _read(scheduler, plan)
        scheduler.check()
    assert not scheduler.has_work and scheduler.pool.held == 0


def _cached(scheduler: Scheduler) -> int:
    return scheduler.admission.cached_tokens


def test_a_prompt_is_computed_anew_and_cached_again() -> None:
    scheduler = _scheduler()
    _submit(scheduler, 0, PROMPT)
    _step(scheduler, bad=True)
    _settle(scheduler)
    assert len(scheduler.tree) == 0
    for number, cached in ((1, 0), (2, 48)):
        before = _cached(scheduler)
        _submit(scheduler, number, PROMPT, max_tokens=1)
        _step(scheduler)
        assert _cached(scheduler) - before == cached
    _settle(scheduler)


def test_what_a_row_made_before_is_not_kept_either() -> None:
    scheduler = _scheduler()
    _submit(scheduler, 0, PROMPT)
    lengths = [int(_step(scheduler).lengths[0]) for _ in range(40)]
    _step(scheduler, bad=True)
    made = [100 + length % 50 for length in lengths]
    _settle(scheduler)
    before = _cached(scheduler)
    _submit(scheduler, 1, PROMPT + made)
    _step(scheduler)
    assert _cached(scheduler) == before


def test_what_follows_a_bad_prompt_is_dropped_and_others_stay() -> None:
    scheduler = _scheduler()
    _submit(scheduler, 0, [*range(150, 183)], max_tokens=1)
    _submit(scheduler, 1, PROMPT[:33], max_tokens=1)
    _step(scheduler)
    _submit(scheduler, 2, PROMPT, max_tokens=1)  # a block behind those of request 1
    _step(scheduler)
    kept = len(scheduler.tree)
    assert kept == 2 + 2 + 1
    _submit(scheduler, 3, PROMPT[:33])
    _step(scheduler, bad=True)
    assert len(scheduler.tree) == 2
    before = _cached(scheduler)
    _submit(scheduler, 4, [*range(150, 183)])
    _step(scheduler)
    assert _cached(scheduler) == before + 32


@pytest.mark.parametrize("caching", [True, False])
def test_a_cancelled_row_that_turns_out_bad(caching: bool) -> None:
    """The cancel comes while the flight is out: its tokens go nowhere, its blocks are not trusted
    all the same."""
    scheduler = _scheduler(prefix_caching=caching)
    _submit(scheduler, 0, PROMPT)
    plan = scheduler.plan()
    assert plan is not None
    scheduler.cancel(0)
    assert _read(scheduler, plan, bad=True) == []
    scheduler.check()
    _settle(scheduler)
    assert len(scheduler.tree) == 0
