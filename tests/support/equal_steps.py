"""Steps that count as equally long, for tests of drafts: rows then draft whatever the machine's
pace."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine.pace import StepPace


def count_as_equal(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone, every step takes a second."""
    patch.setattr(StepPace, "alone", lambda self, rows: 1.0)
    patch.setattr(StepPace, "with_drafts", lambda self, rows, queries: np.ones(queries.size))
