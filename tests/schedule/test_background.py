"""Requests in the background: they take what others leave, and nobody waits for them to end."""

from __future__ import annotations

import numpy as np
import pytest
from schedule_drive import EOS, VOCAB, Drive

from penstock.request import SamplingParams
from penstock.schedule.rows import BACKGROUND, RUNNING
from penstock.schedule.scheduler_config import SchedulerConfig

LONG = SamplingParams(max_tokens=300, ignore_eos=True, seed=1)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True, seed=2)


def drive(rows: int = 16, blocks: int = 1000, tokens: int = 256) -> Drive:
    limits = SchedulerConfig(
        num_blocks=blocks,
        max_rows=rows,
        max_model_len=400,
        max_batched_tokens=tokens,
        vocab_size=VOCAB,
        eos_token_ids=tuple(EOS),
    )
    return Drive(limits)


def turn(driven: Drive, steps: int) -> None:
    """So many steps, each read before the next."""
    for _ in range(steps):
        driven.step()
        if driven.device.results:
            driven.read()


def running(driven: Drive, *, background: bool) -> int:
    rows = driven.scheduler.rows
    return int(
        np.count_nonzero((rows.state == RUNNING) & ((rows.order >= BACKGROUND) == background))
    )


@pytest.mark.parametrize("samples", [1, 40])
def test_it_leaves_rows_free_for_who_comes(samples: int) -> None:
    driven = drive()
    long = SamplingParams(n=samples, max_tokens=60, ignore_eos=True, seed=1)
    for _ in range(40 // samples):
        driven.submit([1, 2, 3], long, background=True)
    turn(driven, 10)
    assert running(driven, background=True) == 14
    driven.submit([4, 5, 6], SHORT)
    turn(driven, 1)
    assert running(driven, background=False) == 1 and driven.scheduler.stats()["preemptions"] == 0
    driven.finish()


@pytest.mark.parametrize("samples", [1, 10])
def test_its_rows_are_given_up_where_others_find_none(samples: int) -> None:
    driven = drive()
    for _ in range(20):
        driven.submit([1, 2, 3], LONG, background=True)
    turn(driven, 10)
    for _ in range(20 // samples):
        driven.submit([4, 5, 6], SamplingParams(n=samples, max_tokens=100, ignore_eos=True, seed=2))
    turn(driven, 8)
    assert running(driven, background=False) == 16 and running(driven, background=True) == 0
    driven.finish()


def test_its_blocks_are_given_up_where_others_find_none() -> None:
    driven = drive(rows=8, blocks=80)
    for number in range(8):
        driven.submit(
            [number] * 150, SamplingParams(max_tokens=200, ignore_eos=True, seed=1), background=True
        )
    turn(driven, 20)
    assert running(driven, background=True) >= 3
    number = driven.submit([9] * 350, SHORT)
    turn(driven, 20)
    assert driven.asked[number].ended
    driven.finish()


def test_it_waits_behind_those_that_came_later() -> None:
    driven = drive(rows=1, blocks=100)
    behind = driven.submit([1, 2, 3], SHORT, background=True)
    later = [driven.submit([number, 2, 3], SHORT) for number in range(5)]
    turn(driven, 22)
    assert all(driven.asked[number].ended for number in later) and not driven.asked[behind].ended
    driven.finish()


def test_a_long_prompt_of_it_lets_others_begin() -> None:
    driven = drive(rows=8, blocks=400, tokens=32)
    driven.submit([7] * 390, SHORT, background=True)
    turn(driven, 2)
    number = driven.submit([4, 5, 6], SHORT)
    turn(driven, 6)
    assert driven.asked[number].ended
    driven.finish()


def test_its_prompts_come_in_small_pieces_while_there_is_company() -> None:
    driven = drive(rows=64, blocks=2_000)
    driven.submit([4, 5, 6], SHORT)
    turn(driven, 1)
    for number in range(20):
        driven.submit([number] * 300, SHORT, background=True)
    plan = driven.step()
    assert plan is not None and plan.chunks is not None and plan.chunks.tokens.size == 256 // 8
    driven.finish()
    for number in range(20):
        driven.submit([100 + number] * 300, SHORT, background=True)
    driven.scheduler.admission._alone_from = 0  # 512 steps later
    plan = driven.step()
    assert plan is not None and plan.chunks is not None and plan.chunks.tokens.size == 256
    driven.finish()
