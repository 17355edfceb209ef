"""More than the queue holds, readers that don't read, streams that are cut at random states, and a
soak, on a whole service: small forms of `make reliability`."""

from __future__ import annotations

import math
from pathlib import Path

import cut_streams
import flood
import pytest
import slow_readers
import soak
from batch_client import Asked
from cut_streams import Tally
from fake_runner import expected

pytestmark = pytest.mark.torch


def test_a_burst_against_a_held_engine(tmp_path: Path) -> None:
    made = flood.all_at_once(tmp_path, 300, 60, held=True)
    assert made.faults({200: 60, 429: 240}) == []


def test_slow_readers_keep_nobody_waiting_and_nothing_behind(tmp_path: Path) -> None:
    made = slow_readers.run(tmp_path, slow=30, normal=10, tokens=30)
    assert made.events == 10 * 29  # every token of the normal ones came
    # their times are the reliability run's to judge
    assert made.faults(most=math.inf) == []


def test_a_soak_has_batches_in_it(tmp_path: Path) -> None:
    """Beside clients that leave nothing while their wave lasts; its memory is a long run's to
    judge."""
    load = soak.Load(clients=8, wave=2.0, rest=1.0, batch=Asked(lines=40, bad=10, ids=20, tokens=8))
    made = soak.soak(tmp_path, 0.05, load)
    assert made.strange == [] and made.tally.faults() == []
    assert made.batches["completed"] >= 1 and made.tally.whole > 0 and made.refused.total() > 0


def test_what_the_runs_call_a_fault() -> None:
    assert len(slow_readers.Beside(alone=0.02, beside=0.03, grown=300 << 20).faults()) == 3
    bad = flood.Flood({0: 1, 200: 5}, wrong=1, no_retry_after=1, grown=300 << 20, at_rest=False)
    assert len(bad.faults()) == 5 and len(bad.faults({200: 6})) == 5
    rising = [(36.0 * at, float(at)) for at in range(100)]  # a megabyte every 36 s
    assert (
        soak.growth(rising) == pytest.approx(100, rel=0.1)
        and soak.growth(rising[:12]) < soak.MOST_GROWTH
    )
    assert soak.growth([(at, 10.0 if at < 1800 else 7.0) for at in range(3600)]) == 0, (
        "what it warmed up by is no leak"
    )


# --- streams cut at random states give everything back, exactly; others get their own tokens alone


def test_cut_at_random_states(tmp_path: Path) -> None:
    tally = cut_streams.run(tmp_path, 200, seed=1)
    assert tally.faults() == [] and tally.preempted > 0
    assert set(tally.left) == {"rows", "waiting", "blocks", "requests", "descriptors", "tasks"}
    assert (
        set(tally.cut) == {"in its body", "sent", "soon", "later", "in its stream"}
        and min(tally.cut.values()) > 10
    )
    assert tally.whole > 10


def test_no_foreign_tokens_among_aborts_and_preemption(tmp_path: Path) -> None:
    tally = cut_streams.run(tmp_path, 200, at_once=200, seed=2, cuts=False)
    assert (
        tally.faults() == []
        and tally.preempted > 0
        and tally.tokens > 5_000
        and tally.cut["later"] > 10
    )


def test_the_harness_sees_foreign_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of another seed, every sampled stream is foreign: the comparison bites."""
    plain = expected

    def other(
        prompt: list[int], count: int, words: list[int], seed: int, sample: int, temperature: float
    ) -> list[int]:
        return plain(prompt, count, words, seed + 1, sample, temperature)

    monkeypatch.setattr(cut_streams, "expected", other)
    tally = cut_streams.run(tmp_path, 20, seed=3, cuts=False)
    assert tally.foreign > 50 and tally.faults() != []
    assert Tally(left={"rows": 0.0, "blocks": 0.5}).faults() == ["blocks left: 0.5"]
