"""Models of every family on the GPU, from start to tokens, against transformers there: graphs and
prefix groups on.

`family_cases` holds the models, the work and the rule: windows, biases, every rope scaling, heads
of 32 to 256, odd numbers of them. Where a window is off by one in one kernel, or a scaling is left
out, logprobs are off by 0.1 to 2 in the mean; 0.00003 in float32 and 0.07 in bfloat16 are allowed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from family_cases import CASES, Work, heads, judge

from penstock.errors import EngineError

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_says_what_transformers_says(name: str, dtype: str, tmp_path: Path) -> None:
    judged = judge(CASES[name], tmp_path, Work(), device="cuda", dtype=dtype)
    assert judged.is_right()
    assert judged.graphs and bool(judged.grouped) is not judged.windowed


def test_heads_too_wide_for_the_kernels_are_one_line(tmp_path: Path) -> None:
    line = "does not compile on .*shared memory.*: run without it by --kernels reference"
    with pytest.raises(EngineError, match=re.compile(line)) as told:
        judge(("Llama", heads(4, 2, 1024)), tmp_path, Work(), device="cuda", dtype="bfloat16")
    assert "\n" not in str(told.value)
