"""Kernels compile for chips that are not here, and those that can't are named: five;
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


def compiled(chip: str, models: str, kernels: str) -> list[str]:
    """Lines of the script about a chip."""
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            *("--chips", chip, "--models", *models.split(), "--kernels", *kernels.split()),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_rows_with_recurrent_state_and_drafts_compile_for_an_h100() -> None:
    first, *others = compiled("90", "delta-drafts mamba2-drafts", "delta_rule._rows mamba2._rows")
    assert first.startswith("sm90: 2 of 2 kernels compile and fit") and not others


def test_an_a100_has_all_but_e4m3() -> None:
    first, *others = compiled(
        "80", "eight-kv", "prefill._prefill advance._advance row_parts.join_parts"
    )
    assert first.startswith("sm80: ") and "fp8e4nv not supported" in "".join(others), others
    assert {line.split()[0] for line in others} == {"prefill._prefill"} and all(
        "as expected" in line for line in others
    )
