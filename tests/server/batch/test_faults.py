"""Batches that are killed and starved of disk: every line, good or bad, comes out once, whole; and
a large one in the small. `make reliability` does more: a kill and a fault at each touch of the
disk, 200 kills."""

from __future__ import annotations

from pathlib import Path

import large_batch
import pytest
from batch_faults import try_all
from batch_kills import kill_and_resume

pytestmark = pytest.mark.torch


def test_killed_at_random_points_every_line_comes_out_once(tmp_path: Path) -> None:
    report = kill_and_resume(tmp_path, kills=6, lines=600, seed=3, longest=0.4)
    assert report.statuses["in_progress"] >= 3, report.statuses
    assert report.faults() == [], "and what is on the disk is not computed again"
    assert report.twice <= 6 * 64 * 2, "what was in flight, and no more"


def test_a_fault_at_a_touch_of_the_disk_costs_nothing(tmp_path: Path) -> None:
    faults = try_all(tmp_path, 20, every=30)
    assert all(count >= 2 for count in faults.tried.values()), faults.tried
    assert faults.report.faults() == []


# --- a large one, as its client sees it; cancelled ones: the soak


def test_a_large_batch_in_the_small(tmp_path: Path) -> None:
    """Lines as long as those of 50,000, ten of them bad. How often it is looked at is the
    reliability run's to say."""
    made = large_batch.run(tmp_path, 400)
    assert made.done.faults == [] and made.done.status == "completed"
    assert made.left == [] and made.at_rest and made.grown["server"] < large_batch.MOST_GROWTH
