"""The client's ceiling: the search for it, what is kept of it, and one measured for real at small
size."""

from __future__ import annotations

from pathlib import Path

import pytest
from at_length import at_length
from growing_patience import patiently

from penstock.bench import calibrate as calibration
from penstock.bench.calibrate import Calibration, Rung, Trial, read_ceiling, write_ceiling
from penstock.errors import RecordError

RUNGS = [Rung(1, 5e4, 1e-3, 6.0, 3e3, 1e-3, 200.0), Rung(4, 2e5, 1e-3, 6.0, 1e4, 1e-3, 200.0)]


@pytest.mark.parametrize("true", [1_300.0, 15_000.0, 55_000.0, 230_000.0, 1e9])
def test_the_search_comes_close_from_below(true: float) -> None:
    tried: list[float] = []

    def attempt(rate: float) -> Trial:
        tried.append(rate)
        return Trial(rate <= true, rate, 0.0, 1.0)

    best = calibration._search(attempt, 1)
    assert best.passed and min(true, calibration.RATES[-1]) / 1.25 <= best.events <= true
    assert len(tried) <= 10


def test_a_ceiling_is_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "deep"))
    assert read_ceiling() is None
    ceiling = Calibration("cpu", 2, "3.11", "0", "2026-01-01T00:00:00Z", RUNGS)
    path = write_ceiling(ceiling)
    assert tmp_path in path.parents and read_ceiling() == ceiling
    found = {processes: ceiling.of(processes) for processes in (1, 3, 4, 9)}
    assert found == {1: RUNGS[0], 3: RUNGS[0], 4: RUNGS[1], 9: RUNGS[1]} and ceiling.of(0) is None
    path.write_text("{}")
    with pytest.raises(RecordError, match="holds no calibration"):
        read_ceiling()


def test_events_and_requests_are_counted_for_real() -> None:
    def trial(seconds: float) -> None:
        found = calibration._events(1, 1000.0, seconds / 2)
        assert found.events > 0 and found.cpu > 0 and found.lag >= 0
        _, seen = calibration._requests(1, seconds / 3)
        assert seen.requests_per_second > 0 and seen.troubles.keys() <= {"unfinished"}

    patiently(trial)


@at_length
def test_no_more_events_are_counted_than_were_sent() -> None:
    assert 900 < calibration._events(1, 1000.0, 2.0).events <= 1100
