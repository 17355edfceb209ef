"""A batch as its client sees it: a large one in the small. Cancelled ones: the soak."""

from __future__ import annotations

from pathlib import Path

import large_batch
import pytest

pytestmark = pytest.mark.torch


def test_a_large_batch_in_the_small(tmp_path: Path) -> None:
    """Lines as long as those of 50,000, ten of them bad. How often it is looked at is the reliability run's to say."""
    made = large_batch.run(tmp_path, 400)
    assert made.done.faults == [] and made.done.status == "completed"
    assert made.left == [] and made.at_rest and made.grown["server"] < large_batch.MOST_GROWTH
