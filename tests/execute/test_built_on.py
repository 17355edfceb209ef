"""What a manifest says of the machine: asked of this one, and of a driver's file as it stands on a
GPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.execute import built_on as built_on_file
from penstock.execute.built_on import built_on

pytestmark = pytest.mark.torch

SAID = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build "
    " (root@builder)  GCC 12.2.0\n"
)


def test_this_processor() -> None:
    told = built_on(torch.device("cpu"))
    assert (told.device, told.capability, told.driver, told.torch) == (
        "cpu",
        None,
        None,
        torch.__version__,
    )
    assert told.memory_bytes > 1 << 28 and len(told.processor) > 3


def test_the_drivers_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built_on_file, "_DRIVER", tmp_path / "version")
    assert built_on_file._driver() is None
    (tmp_path / "version").write_text(SAID + "GCC version:  gcc version 13.3.0 (Ubuntu)\n")
    assert built_on_file._driver() == "580.82.07"
