"""What the kernels' tests share."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[1, 2], ids=["values", "both"])
def eight(request: pytest.FixtureRequest) -> int:
    """What of KV is in eight bits: kernels/layer_kv.py."""
    found: int = request.param
    return found
