"""What a plan is staged as: a tensor for each thing that it changes, nothing for the rest, and the
host's columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from execute_drive import Ask, Row, _joins

from penstock.execute.kv_cache import KvCache
from penstock.execute.padding import EXACT, PADDED, BesideSizes, StepSizes
from penstock.execute.sampling_mirror import SamplingMirror
from penstock.execute.staged_plan import PlanStager, StagedPlan
from penstock.execute.staging_buffer import Staging
from penstock.schedule.step import Int32, StepPlan, plain_step

pytestmark = pytest.mark.torch

ROWS, DEAD = 8, 23
CPU = torch.device("cpu")


def _stager(sizes: StepSizes) -> PlanStager:
    kv = KvCache([], 50, CPU)
    staging, asked = Staging(24, 8, CPU), SamplingMirror(DEAD)
    return PlanStager(staging, sizes, asked, kv, None, DEAD, sizes is PADDED, False)


def _plan(groups: Int32 | None = None) -> StepPlan:
    plan = plain_step(0, np.arange(ROWS, dtype=np.int32), np.full(ROWS, 20, np.int32))
    if groups is not None:
        plan.group_start = np.arange(len(groups) + 1, dtype=np.int32) * 2
        plan.group_blocks, plan.group_length = groups, np.full(len(groups), 16, np.int32)
    return plan


def _brings(staged: StagedPlan) -> set[str]:
    named = (
        "pages",
        "cleared",
        "moved_blocks",
        "moved_slots",
        "joins",
        "new_blocks",
        "masks",
        "group_blocks",
        "chunks",
    )
    return {name for name in named if getattr(staged, name) is not None}


def test_a_plain_step_brings_nothing() -> None:
    staged = _stager(PADDED).stage(_plan(), BesideSizes(ROWS, ROWS, True))
    assert not _brings(staged) and (staged.queries, staged.groups) == (ROWS, 0)


@pytest.mark.parametrize("sizes", [PADDED, EXACT])
def test_group_blocks_are_sent_again_only_where_they_do_not_stay(sizes: StepSizes) -> None:
    stager, found = _stager(sizes), []
    for block in (5, 5, 6, 6, 5):
        staged = stager.stage(
            _plan(np.array([[block], [9]], np.int32)), BesideSizes(ROWS, ROWS, True)
        )
        assert staged.groups == 2
        found.append(None if staged.group_blocks is None else staged.group_blocks[0, 0].item())
    assert found == ([5, None, 6, None, 5] if sizes is PADDED else [5, 5, 6, 6, 5])


def test_what_joins_brings_its_biases_and_where_they_lie() -> None:
    stager, plan = _stager(EXACT), _plan()
    asks = [Ask(bias={3: 1.5, 4: -2.0}), Ask(), Ask(bias={7: 0.5})]
    plan.joins = _joins(
        [Row(at, [8] * 20, 20, 40, [at + 1], ask, 0, 19) for at, ask in enumerate(asks)]
    )
    plan.moves.blocks, plan.new_blocks = (
        np.array([[1, 4]], np.int32),
        np.array([[2, 1, 6]], np.int32),
    )
    staged = stager.stage(plan, BesideSizes(ROWS, ROWS, True))
    assert (
        _brings(staged) == {"joins", "moved_blocks", "new_blocks"}
        and staged.moved_blocks is not None
    )
    assert [told.tolist() for told in staged.moved_blocks] == [
        [1],
        [4],
    ] and staged.joins is not None
    biases, lines = staged.joins.biases, staged.joins.lines
    assert biases is not None and biases.first == 0 and biases.ids.tolist() == [3, 4, 7]
    assert biases.start is not None and biases.start[:3].tolist() == [0, 2, 2], (
        "the pool was packed anew"
    )
    assert lines[:, 0].tolist() == [0, 1, 2] and staged.new_blocks is not None
    assert staged.new_blocks[:2].tolist() == [[2, 1, 6], [-1, -1, -1]]
