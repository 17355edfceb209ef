"""The client's ceiling: the search for it, what is kept of it, and one measured for real at small size."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from penstock.bench import calibrate as calibration
from penstock.bench.calibrate import Calibration, Rung, Trial, machine_key, read_ceiling, write_ceiling
from penstock.cli import app
from penstock.errors import RecordError

RUNGS = [Rung(1, 5e4, 1e-3, 6.0, "lag", 3e3, 1e-3, 200.0), Rung(4, 2e5, 1e-3, 6.0, "lag", 1e4, 1e-3, 200.0)]


@pytest.mark.parametrize("true", [1_300.0, 15_000.0, 55_000.0, 230_000.0, 1e9])
def test_the_search_comes_close_from_below(true: float) -> None:
    tried: list[float] = []

    def attempt(rate: float) -> Trial:
        tried.append(rate)
        return Trial(rate <= true, rate, 0.0, 1.0, f"at {rate:.0f}")

    best, why = calibration._search(attempt, 1)
    assert best.passed and min(true, calibration.RATES[-1]) / 1.25 <= best.events <= true
    assert why.startswith("at ") or (true == 1e9 and why == "not tried")
    assert len(tried) <= 10


@pytest.mark.parametrize("lacks", ["events", "requests"])
def test_a_machine_that_is_too_busy_is_told_so_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    rungs = {1: RUNGS[0], 2: msgspec.structs.replace(RUNGS[0], processes=2, **{lacks: 0.0})}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "_rung", lambda count, seconds: rungs[count])
    said = CliRunner().invoke(app, ["bench", "calibrate", "--most", "2"])
    assert said.exit_code == 1 and read_ceiling() is None
    assert "too busy to be measured: 2 processes never kept time; nothing was written" in said.stderr
    assert said.stdout.startswith("1 process: 50,000 events/s")
    assert CliRunner().invoke(app, ["bench", "calibrate", "--most", "1"]).exit_code == 0
    assert read_ceiling() is not None


def test_one_failure_is_forgiven() -> None:
    tried: list[float] = []

    def attempt(rate: float) -> Trial:
        tried.append(rate)
        return Trial(rate <= 40_000 and tried.count(rate) == 2, rate, 0.0, 1.0, "lag")

    assert 40_000 / 1.25 < calibration._search(attempt, 1)[0].events <= 40_000


def test_a_ceiling_is_kept_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "ceiling.json"
    assert read_ceiling(path) is None
    ceiling = Calibration(machine_key(), "cpu", 2, "3.11", "0", "2026-01-01T00:00:00Z", RUNGS)
    assert write_ceiling(ceiling, path) == path and read_ceiling(path) == ceiling
    found = {processes: ceiling.of(processes) for processes in (1, 3, 4, 9)}
    assert found == {1: RUNGS[0], 3: RUNGS[0], 4: RUNGS[1], 9: RUNGS[1]} and ceiling.of(0) is None
    write_ceiling(msgspec.structs.replace(ceiling, machine="other"), path)
    with pytest.raises(RecordError, match="another machine"):
        read_ceiling(path)
    path.write_text("{}")
    with pytest.raises(RecordError, match="holds no calibration"):
        read_ceiling(path)


def test_events_and_requests_are_counted_for_real() -> None:
    trial = calibration._events(1, 1000.0, 0.5)
    assert 0 < trial.events <= 1100 and 0 < trial.cpu < 10_000 and trial.lag >= 0
    _, seen = calibration._requests(1, 0.3)
    assert seen.requests_per_second > 0 and seen.troubles.keys() <= {"unfinished"}
