"""How many threads compute on the CPU: what the system says of cores is given by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.execute import cpu_threads
from penstock.execute.cpu_threads import WINDOWS, free_cores, quota_of, settle_threads

pytestmark = pytest.mark.torch


class Told:
    """/proc/stat as it goes on: in each window a core is idle for so many of 5 ticks."""

    def __init__(self, *windows: tuple[int, ...]) -> None:
        self.windows, self.at, self.waits = windows, 0, 0

    def look(self) -> str:
        idle = [
            sum(window[core] for window in self.windows[: self.at])
            for core in range(len(self.windows[0]))
        ]
        busy = [5 * self.at - each for each in idle]
        lines = [
            f"cpu{core} {busy[core]} 0 0 {idle[core]} 0 0 0 0 {busy[core]} 0"
            for core in range(len(idle))
        ]
        return "\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 5 1", "procs_running 3"])

    def wait(self, seconds: float) -> None:
        self.at, self.waits = min(self.at + 1, len(self.windows)), self.waits + 1

    def free(self, cores: list[int]) -> float:
        return free_cores(cores, len(cores), self.look, self.wait)


def test_idle_cores_are_counted_and_looked_at_once() -> None:
    told = Told((5, 4, 0, 0))
    assert told.free([0, 1]) == pytest.approx(1.8) and told.waits == 1


def test_what_is_busy_for_a_moment_only_is_free() -> None:
    told = Told((0, 1), (0, 2), (5, 5))
    assert told.free([0, 1]) == 2 and told.waits == 3


def test_what_stays_busy_is_not() -> None:
    told = Told(*[(1, 0)] * WINDOWS)
    assert told.free([0, 1]) == pytest.approx(0.2) and told.waits == WINDOWS
    assert Told(*[(5, 0)] * WINDOWS).free([0, 1]) == 1


def test_a_system_that_counts_nothing_has_all_free() -> None:
    assert Told((0, 0)).free([7]) == 1
    still = free_cores(
        [0, 1], 2, lambda: "cpu0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0", lambda seconds: None
    )
    assert still == 2


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000\n", float("inf")), ("150000 100000\n", 1.5), ("", float("inf"))],
)
def test_a_quota(text: str, cores: float, tmp_path: Path) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(text)
    assert quota_of(path) == cores and quota_of(tmp_path / "none") == float("inf")


@pytest.mark.parametrize(
    ("free", "quota", "set_", "left", "said"),
    [
        (0.0, "max 1", None, 1, "other work leaves 0.0: 1 of 4 threads"),
        (2.6, "max 1", None, 3, "other work leaves 2.6: 3 of 4 threads"),
        (4.0, "200 100", None, 2, "a quota leaves 2: 2 of 4 threads"),
        (3.6, "max 1", None, 4, ""),
        (0.0, "100 100", "4", 4, ""),
    ],
)
def test_what_is_taken_is_said(
    free: float,
    quota: str,
    set_: str | None,
    left: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, threads = tmp_path / "cpu.max", [4]
    path.write_text(quota)
    monkeypatch.setattr(cpu_threads, "free_cores", lambda cores, enough: free)
    monkeypatch.setattr(cpu_threads, "QUOTA", path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: threads.__setitem__(0, count))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_ is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", set_)
    settle_threads(torch.device("cpu"))
    told = capsys.readouterr().err
    assert threads == [left] and (said in told if said else not told)
    settle_threads(torch.device("cuda"))
    assert threads == [left]
