"""Steps that count as equally long, for tests of drafts: rows then draft whatever the machine's
pace."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine.pace import StepPace


def count_as_equal(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone, every step takes a second."""
    patch.setattr(StepPace, "seconds", lambda self, queries, drafting: np.ones(queries.size))
