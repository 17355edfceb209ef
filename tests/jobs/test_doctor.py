"""What the doctor says of a GPU that is not here: made-up properties, as torch would tell them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from penstock.execute import limits
from penstock.jobs import doctor

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("major", "untested"), [(8, True), (9, False), (12, True)])
def test_a_gpu_that_our_kernels_were_not_tried_on_is_named_so(
    monkeypatch: pytest.MonkeyPatch, major: int, untested: bool
) -> None:
    told = SimpleNamespace(name="A GPU", major=major, minor=0, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: told)
    monkeypatch.setattr(limits, "free_memory", lambda device: 79 << 30)
    line = dict(doctor.machine())["GPU 0"]
    assert f"compute capability {major}.0" in line
    assert ("untested" in line) is untested
