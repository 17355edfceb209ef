"""Kernels compile for chips that are not here, and those that can't are named: three;
scripts/compile_kernels.py has all, for sm80 to sm90."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        find_spec("triton") is None, reason="Triton comes with CUDA builds of PyTorch"
    ),
]

SCRIPT = Path(__file__).parents[2] / "scripts" / "compile_kernels.py"


def test_an_a100_has_all_but_e4m3() -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            "--chips",
            "80",
            "--models",
            "eight-kv",
            "--kernels",
            "prefill._prefill",
            "advance._advance",
            "decode._join",
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, *others = done.stdout.splitlines()
    assert first.startswith("sm80: ") and "fp8e4nv not supported" in "".join(others), done.stdout
    assert {line.split()[0] for line in others} == {"prefill._prefill"} and all(
        "as expected" in line for line in others
    )
