"""What is said while a run goes on."""

from __future__ import annotations

import io
import math

import pytest

from penstock.bench.live_progress import LiveProgress
from penstock.bench.point_planner import CLOSED, OPEN, SATURATION, PointPlan
from penstock.bench.worker_pool import LoadProgress
from penstock.bench.worker_protocol import Load, PlannedRequest


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def load(stop_after: float = 90.0, window: tuple[float, float] = (10.0, 70.0)) -> Load:
    return Load([PlannedRequest(math.nan, b"", 1, 1)], 1, stop_after, 9.0, window)


def now(**more: float) -> LoadProgress:
    told = {
        "seconds": 20.0,
        "asked": 100,
        "sent": 60,
        "ended": 40,
        "failed": 0,
        "in_flight": 20,
        "events": 4000,
        "output_tokens": 5000,
        "unfinished": 0,
        "waiting": 0,
    }
    return LoadProgress(**{**told, **more}, firsts=[0.1] * 90 + [0.9] * 10)  # type: ignore[arg-type]


def lines(out: io.StringIO) -> list[str]:
    return [
        each.strip("\x1b[K")
        for each in out.getvalue().replace("\n", "\r").split("\r")
        if each.strip("\x1b[K")
    ]


@pytest.mark.parametrize(
    ("kind", "progress", "left"),
    [
        (SATURATION, now(), "about 30 s left"),  # 60 of 100 are to come, 2 a second
        (SATURATION, now(ended=0), "at most 70 s left"),
        (OPEN, now(), "50 s left"),
        (CLOSED, now(seconds=80.0), "at most 10 s left"),
    ],
)
def test_a_terminal_shows_rate_first_tokens_flight_and_end(
    kind: str, progress: LoadProgress, left: str
) -> None:
    out = Terminal()
    plan = PointPlan("point-7", kind, 0, 60.0)
    with LiveProgress("128x64", out) as live:
        live.tell(plan, load(), None)
        live.tell(plan, load(), progress)
    line = next(each for each in lines(out) if "in flight" in each)
    rate = f"{5000 / progress.seconds:,.1f}".split(".")[0]
    for needed in (
        "128x64 point 1 point-7",
        f"{rate} tok/s",
        "p50 100 p95 900 ms",
        "20 in flight",
        left,
    ):
        assert needed in line
    assert line.endswith(left) and len(line) <= 200


def test_a_point_that_is_stopped_is_not_told_as_done() -> None:
    out = io.StringIO()
    plan = PointPlan("open-9", OPEN, 0, 60.0)
    with pytest.raises(KeyboardInterrupt), LiveProgress("128x64", out) as live:
        live.tell(plan, load(), None)
        live.tell(plan, load(), now())
        raise KeyboardInterrupt
    assert lines(out)[-1].startswith("128x64 open-9: 40 ended, 0 failed, stopped after ")
