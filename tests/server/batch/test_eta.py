"""When a batch is expected to end, by a clock that the test holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.server.batch import pipeline
from penstock.server.batch.pipeline import Eta


def test_an_end_is_expected_from_now_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=lambda: 50_000 + now[0])
    monkeypatch.setattr(pipeline, "time", clock)
    progress = Eta()
    assert progress.expected_end(100) is None
    assert progress.expected_end(100, 30.0, 50) == 51_060, "before anything is counted, too"
    progress.note(0)
    assert progress.expected_end(100) is None, "nothing is done yet"
    now[0] += 10
    progress.note(20)
    assert progress.expected_end(100) == 51_010 + 40, "80 to go, 2 a second"
    now[0] += 30  # the online load leaves nothing
    assert progress.expected_end(100) == 51_040 + 160, "80 to go, half a one a second"
    now[0] += 3600
    assert progress.expected_end(100) > 50_000 + now[0]
    for _ in range(61):
        now[0] += 1
        progress.note(20)
    assert progress.expected_end(100) is None, "none in the last minute"
    assert progress.expected_end(100, 30.0, 16) == round(50_000 + now[0] + 30 * 80 / 16), (
        "as the scheduler expects"
    )
    assert progress.expected_end(100, 30.0, 200) == 50_000 + now[0] + 30, (
        "no sooner than what is at the engine"
    )
    assert (
        progress.expected_end(100, 30.0, 0) is None and progress.expected_end(100, 0.0, 16) is None
    )
    now[0] += 1
    progress.note(21)
    assert progress.expected_end(100) == pytest.approx(50_000 + now[0] + 79 * 60, abs=79)
    assert progress.expected_end(100, 30.0, 16) == progress.expected_end(100), (
        "by the rate it is later"
    )
    progress.note(70)
    assert progress.expected_end(100) < 50_000 + now[0] + 60, "a wave of lines has ended"
    assert progress.expected_end(100, 60.0, 20) == 50_000 + now[0] + 90, (
        "and the next takes longer than it seems"
    )
