"""Sums over ranks in Triton's interpreter: ranks that write into each other's memory, wait, add,
and leave it empty.

The interpreter runs a rank's programs one after the other, each in a process
(tests/support/interpreted_ranks.py). What GPUs do at once is benchmarks/gpu_timing/all_reduce.py's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        find_spec("triton") is None, reason="Triton comes with CUDA builds of PyTorch"
    ),
]

USUAL = {"dtype": "float32", "calls": 4, "room": 1 << 14, "one_shot": None}  # None: by turns
SUMS = {
    f"{ranks} ranks, {count} numbers in {dtype}": {
        **USUAL,
        "ranks": ranks,
        "count": count,
        "dtype": dtype,
    }
    for ranks, count, dtype in ((2, 64, "float16"), (3, 101, "float16"), (4, 157, "float32"))
}
PIECES = {
    f"more than there is room for, {form}": {
        **USUAL,
        "ranks": 2,
        "count": 150,
        "room": 1 << 9,
        "calls": 2,
        "one_shot": one_shot,
    }
    for form, one_shot in (("one shot", True), ("two shots", False))
}
GATHERS = {
    f"a gathering of {dtype}": {**USUAL, "ranks": 3, "count": 20, "dtype": dtype, "gathers": True}
    for dtype in ("float32", "int64")
}
ABSENT = {
    f"rank {absent} of 4 doesn't come, {form}": {
        **USUAL,
        "ranks": 4,
        "count": 64,
        "absent": absent,
        "me": 2,
        "one_shot": one_shot,
    }
    for absent in (0, 1, 3)
    for form, one_shot in (("one shot", True), ("two shots", False))
}
CASES = {**SUMS, **PIECES, **GATHERS, **ABSENT}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    script = Path(__file__).parents[1] / "support" / "interpreted_ranks.py"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ran = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(list(CASES.values())),
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return dict(zip(CASES, json.loads(ran.stdout), strict=True))


@pytest.mark.parametrize("case", [*SUMS, *PIECES, *GATHERS])
def test_every_rank_has_all_of_it_in_the_ranks_order_and_memory_is_empty_again(
    case: str, found: dict[str, dict[str, Any]]
) -> None:
    told = found[case]
    calls = told["state"][0][0]
    assert told["wrong"] == [] and told["left"] == 0
    assert calls > CASES[case]["calls"] if case in PIECES else calls == CASES[case]["calls"]
    assert told["state"] == [[calls, 0, 0]] * CASES[case]["ranks"] and not any(told["host"])


@pytest.mark.parametrize("case", ABSENT)
def test_a_rank_that_does_not_come_is_named_and_waited_for_once(
    case: str, found: dict[str, dict[str, Any]]
) -> None:
    """It is the host's word; a later call looks once, though it may look for ever, and names nobody
    else."""
    absent = CASES[case]["absent"]
    assert found[case] == {"state": [2, 0, absent + 1], "host": absent + 1}
