"""What is said while a run goes on, and what a machine says of itself."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest

from penstock.almanac.record import MachineInfo
from penstock.bench.live_progress import LiveProgress
from penstock.bench.machine_probe import machine_of, this_machine
from penstock.bench.point_planner import CLOSED, OPEN, SATURATION, PointPlan
from penstock.bench.run_load import Load
from penstock.bench.worker_pool import LoadProgress
from penstock.bench.worker_protocol import PlannedRequest
from penstock.errors import UsageError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def load(stop_after: float = 90.0, window: tuple[float, float] = (10.0, 70.0)) -> Load:
    return Load([PlannedRequest(math.nan, b"", 1, 1)], 1, stop_after, 9.0, window)


def now(**more: float) -> LoadProgress:
    told = {"seconds": 20.0, "asked": 100, "sent": 60, "ended": 40, "failed": 0, "in_flight": 20, "events": 4000,
            "output_tokens": 5000, "unfinished": 0, "waiting": 0}  # fmt: skip
    return LoadProgress(**{**told, **more}, firsts=[0.1] * 90 + [0.9] * 10)  # type: ignore[arg-type]


def lines(out: io.StringIO) -> list[str]:
    return [each.strip("\x1b[K") for each in out.getvalue().replace("\n", "\r").split("\r") if each.strip("\x1b[K")]


@pytest.mark.parametrize(
    ("kind", "progress", "left"),
    [
        (SATURATION, now(), "about 30 s left"),  # 60 of 100 are to come, 2 a second
        (SATURATION, now(ended=0), "at most 70 s left"),
        (OPEN, now(), "50 s left"),
        (CLOSED, now(seconds=80.0), "at most 10 s left"),
    ],
)
def test_a_terminal_shows_rate_first_tokens_flight_and_end(kind: str, progress: LoadProgress, left: str) -> None:
    out = Terminal()
    plan = PointPlan("point-7", kind, 0, 60.0)
    with LiveProgress("128x64", out) as live:
        live.tell(plan, load(), None)
        live.tell(plan, load(), progress)
    line = next(each for each in lines(out) if "in flight" in each)
    rate = f"{5000 / progress.seconds:,.1f}".split(".")[0]
    for needed in ("128x64 point 1 point-7", f"{rate} tok/s", "p50 100 p95 900 ms", "20 in flight", left):
        assert needed in line
    assert line.endswith(left) and len(line) <= 200


# --- machines


def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str, code: int = 0) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{rows}'\nexit {code}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


ROW = "NVIDIA H200, 143771, 580.95.05, 345, 3201, 1980"


def test_gpus_are_those_that_the_engine_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, f"{ROW}\\n{ROW}\\n")
    gpu = this_machine().gpu
    assert gpu is not None and (gpu.name, gpu.count, gpu.memory_mib) == ("NVIDIA H200", 2, 143771)
    assert gpu.driver == "580.95.05" and "SM 345 MHz of 1980" in gpu.clocks
    for visible, count in (("1", 1), ("0,1", 2), ("GPU-8932f937", 1), ("", None), ("-1", None)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        gpu = this_machine().gpu
        assert (gpu.count if gpu is not None else None) == count
    hidden = this_machine({"CUDA_VISIBLE_DEVICES": "0"}).gpu  # by --env, whatever this process may see
    assert hidden is not None and hidden.count == 1


def test_a_machine_elsewhere_is_what_its_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, f"{ROW}\\n")
    told = MachineInfo(gpu=None, cpu="far", cores=64, memory_mib=9, system="Linux", python="3.12")
    (tmp_path / "m.json").write_text(told.model_dump_json())
    assert machine_of(tmp_path / "m.json", "http://192.0.2.1:8000", started=False) == told
    assert machine_of(None, "http://localhost:8000", started=False).cpu == this_machine().cpu
    with pytest.raises(UsageError, match=r"the server is on 192\.0\.2\.1: describe that machine"):
        machine_of(None, "http://192.0.2.1:8000", started=False)
    with pytest.raises(UsageError, match="describes no machine: No such file"):
        machine_of(tmp_path / "none.json", None, started=False)
