"""The engine gives what it gave: the golden record replayed on the CPU, in the ways in which most
can go wrong.

All ways: `python tests/golden/record.py --check KIND`; test_golden_gpu.py replays a GPU's record
there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from corpus import MODELS
from record import replay

LATE, TIGHT = "3 ahead, preempted", "few blocks, chunked"
WAYS = [("llama", LATE), ("llama", TIGHT), ("qwen2", TIGHT), ("qwen3", LATE)]


def test_every_model_is_replayed() -> None:
    assert {model for model, _ in WAYS} == set(MODELS)


@pytest.mark.parametrize("model, variant", WAYS)
def test_tokens_and_logprobs_are_the_recorded_ones(
    model: str, variant: str, tmp_path: Path
) -> None:
    found = replay(model, variant, "cpu-float32", tmp_path)
    assert found.samples > 40 and found.scores > 500
    assert not found.parted, found.parted[:3]
    assert found.furthest < 3e-4 and not found.regrouped
