"""How many tokens a pool holds where most layers have a window: 26 layers of which each sixth sees
everything."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import CapacityError
from penstock.request import Request, SamplingParams
from penstock.schedule.rows import RUNNING
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.step import StepTokens
from penstock.schedule.windowed_pool import WindowedPool

LAYERS, FULL, TABLES = 26, 4, 6
BLOCKS = 180  # that a pool without windows has


def most_held(blocks: int, window: int, tables: int, length: int) -> int:
    """Runs many requests of one length -> the most tokens that rows held at once."""
    limits = SchedulerConfig(
        num_blocks=blocks,
        max_rows=24,
        max_model_len=length,
        max_batched_tokens=64,
        vocab_size=9,
        window=window,
        window_tables=tables,
    )
    scheduler, most = Scheduler(limits), 0
    for number in range(24):
        params = SamplingParams(max_tokens=length - 1, ignore_eos=True)
        scheduler.submit(
            Request(request_id=number, prompt=np.array([1], np.int32).tobytes(), sampling=params)
        )
    while scheduler.has_work:
        plan = scheduler.plan()
        if plan is not None:
            scheduler.commit(plan, StepTokens(np.full(plan.rows.size, 2, np.int32)))
        rows = scheduler.rows
        most = max(most, int(rows.read_length[rows.state == RUNNING].sum()))
    scheduler.check()
    assert scheduler.pool.held == 0
    return most


def test_four_times_the_tokens_in_the_same_memory() -> None:
    """A window of 1/16 of the sequence, as 512 tokens are of 8,192."""
    length, window = 1024, 64
    pages = BLOCKS * LAYERS // FULL  # of the same bytes
    plain = most_held(BLOCKS, 0, 0, length)
    held = most_held(pages, window, TABLES, length)
    assert 4 * plain <= held <= 5 * plain, f"{plain} and {held} tokens"


def test_what_one_row_takes_whose_window_has_passed() -> None:
    """A block of every layer, and the window's of the others: 8,192 tokens in 1 / 4.6 of the
    layers' memory."""
    near = -(-(512 - 1) // 16) + 1
    assert 4.5 < LAYERS * 512 / (FULL * (512 + TABLES * near)) < 5


def test_loose_pages_go_before_what_the_tree_keeps() -> None:
    pool = WindowedPool(13, window=16, tables=2)
    kept = pool.take(2)
    pool.kept[kept] = True
    pool.release(kept)
    held = pool.take(2)
    pool.loosen(held[[0, 0]])
    assert (pool.available, pool.free) == (2, 0)
    pool.refs.flags.writeable = True
    (given,) = pool.take(1).tolist()
    assert not pool.is_whole(int(held[0])) and pool.is_whole(int(held[1])) and pool.is_whole(given)
    with pytest.raises(CapacityError, match="pages"):
        pool.take(3)
