"""Batches that are killed and starved of disk: every line, good or bad, comes out once, whole. `make reliability` does
more: a kill and a fault at each touch of the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from batch_faults import try_all

pytestmark = pytest.mark.torch


def test_a_fault_at_a_touch_of_the_disk_costs_nothing(tmp_path: Path) -> None:
    faults = try_all(tmp_path, 20, every=16)
    assert all(count >= 2 for count in faults.tried.values()), faults.tried
    assert faults.report.faults() == []
