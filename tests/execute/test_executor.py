"""The CPU's executor gives memory back to the system now and then, between steps."""

from __future__ import annotations

import pytest
import torch

from penstock.execute import executor
from penstock.execute.executor import Outcome, ThreadExecutor

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("every", "times"), [(0.0, 3), (1e9, 0)])
def test_memory_is_given_back_now_and_then(
    monkeypatch: pytest.MonkeyPatch, every: float, times: int
) -> None:
    given: list[int] = []
    monkeypatch.setattr(executor, "TRIM", every)
    monkeypatch.setattr(executor, "_malloc_trim", given.append)
    device = ThreadExecutor()
    flights = [device.launch(lambda: Outcome(torch.zeros(1, dtype=torch.int32))) for _ in range(3)]
    assert [flight.fetch().tokens.tolist() for flight in flights] == [[0]] * 3
    device.close()
    assert given == [0] * times
