"""Streams cut at random states give everything back, exactly; those that are not cut get their own tokens alone."""

from __future__ import annotations

from pathlib import Path

import cut_streams
import pytest
from cut_streams import Tally
from fake_runner import expected

pytestmark = pytest.mark.torch


def test_cut_at_random_states(tmp_path: Path) -> None:
    tally = cut_streams.run(tmp_path, 400, seed=1)
    assert tally.faults() == [] and tally.preempted > 0
    assert set(tally.left) == {"rows", "waiting", "blocks", "requests", "descriptors", "tasks"}
    assert set(tally.cut) == {"in its body", "sent", "soon", "later", "in its stream"} and min(tally.cut.values()) > 20
    assert tally.whole > 20


def test_no_foreign_tokens_among_aborts_and_preemption(tmp_path: Path) -> None:
    tally = cut_streams.run(tmp_path, 400, at_once=200, seed=2, cuts=False)
    assert tally.faults() == [] and tally.preempted > 0 and tally.tokens > 10_000 and tally.cut["later"] > 20


def test_the_harness_sees_foreign_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of another seed, every sampled stream is foreign: the comparison bites."""
    plain = expected

    def other(prompt: list[int], count: int, words: list[int], seed: int, sample: int, temperature: float) -> list[int]:
        return plain(prompt, count, words, seed + 1, sample, temperature)

    monkeypatch.setattr(cut_streams, "expected", other)
    tally = cut_streams.run(tmp_path, 20, seed=3, cuts=False)
    assert tally.foreign > 50 and tally.faults() != []
    assert Tally(left={"rows": 0.0, "blocks": 0.5}).faults() == ["blocks left: 0.5"]
