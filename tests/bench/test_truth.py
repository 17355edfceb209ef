"""What the bench says of a server whose truth is known: the real client, a server with drawn times,
real time.

Loads go beside each other (8 s, mostly waiting):

    drawn     an open loop, drawn as a run's are; first tokens lognormal, gaps exponential: what is
    drawn is true
    stall     a server that stops once for 1.5 s, met by an open loop and a closed one
    silence   one that stops for good, met by `penstock bench run URL`

Times are large against a busy machine's hiccups, and the server stamps what it does: the mean of
its own lateness is added to the truth; what the client adds is not. That intervals of such samples
cover is shown without a client (tests/almanac/test_intervals.py).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from bench_runs import MACHINE
from made_samples import LOOK
from timed_server import Draw, Stamp, TimedPlan, read_stamps, timed_server

from penstock.almanac.figures import point_of
from penstock.almanac.record import Point
from penstock.almanac.samples import Samples
from penstock.almanac.validate import validate
from penstock.bench.endpoint import Endpoint
from penstock.bench.request_schedule import arrivals
from penstock.bench.run_load import run_load
from penstock.bench.worker_protocol import Load, PlannedRequest

MEDIAN, SIGMA, GAP, TOKENS = 0.4, 0.5, 0.05, 4  # of the drawn requests
RATE, OPENS, SECONDS = 150.0, 1.0, 5.0
EVERY, COUNT, BASE, STALL, STALL_AT = 0.02, 200, 0.005, 1.5, 60  # of the server that stalls once


class Drawn(NamedTuple):
    """begin: of the point, by the clock that the stamps have."""

    samples: Samples
    stamps: list[Stamp]
    begin: float


class Measured(NamedTuple):
    drawn: Drawn
    opened: Samples
    closed: Samples
    silent: subprocess.CompletedProcess[str]
    folder: Path


def body(tokens: int) -> bytes:
    return json.dumps({"prompt": [0, 1, 2, 3], "max_tokens": tokens, "stream": True}).encode()


def drawn(stamps: Path) -> Drawn:
    times = arrivals(
        RATE, OPENS, OPENS + SECONDS, OPENS + SECONDS, np.random.default_rng(int(RATE))
    )
    asks = [PlannedRequest(float(at), body(TOKENS), 4, TOKENS) for at in times]
    load = Load(asks, None, 300.0, 300.0, (OPENS, OPENS + SECONDS))
    first, gap = Draw("lognormal", MEDIAN, SIGMA), Draw("exponential", GAP)
    with timed_server(
        TimedPlan(first=first, gap=gap, seed=os.getpid(), stamps=str(stamps))
    ) as server:
        samples, seen = run_load(
            Endpoint("127.0.0.1", server.port), load, point="p", start=0, processes=2
        )
    assert set(samples.outcome) == {"ok"} and np.allclose(samples.intended, times, atol=1e-6)
    return Drawn(samples, read_stamps(stamps), seen.begin)


def stalling(meet: Callable[[int], Samples]) -> Samples:
    """What a client makes of a server that stops once."""
    with timed_server(
        TimedPlan(first=Draw("fixed", BASE), stall_at=STALL_AT, stall_for=STALL)
    ) as server:
        return meet(server.port)


def looped(closed: int | None) -> Callable[[int], Samples]:
    asks = [
        PlannedRequest(EVERY * at if closed is None else math.nan, body(1), 4, 1)
        for at in range(COUNT)
    ]
    load = Load(asks, closed, 300.0, 300.0, (0.0, 300.0))
    return lambda port: run_load(
        Endpoint("127.0.0.1", port), load, point="p", start=0, processes=1
    )[0]


def silenced(folder: Path) -> subprocess.CompletedProcess[str]:
    """A run against a server that falls silent when 40 requests have come: at most 14 before
    everything at once."""
    plan = TimedPlan(first=Draw("fixed", 0.1), stall_at=40, stall_for=1e9)
    machine = folder.with_name("machine.json")  # whatever this one has
    machine.write_text(MACHINE.model_dump_json())
    quick = (
        "--short --no-ladder --warm-up 0.2 --window 0.6 --longest 30 --drain 0.3 --at-once 64"
        " --alone 3 --enough 10"
    )
    with timed_server(plan) as server:
        command = [
            sys.executable,
            "-m",
            "penstock",
            "bench",
            "run",
            f"http://127.0.0.1:{server.port}",
            "--model",
            "null",
            "--shape",
            "8x4",
            "--goal",
            "1",
            "--bisections",
            "1",
            "--stall",
            "1",
            "--out",
            str(folder),
            "--machine",
            str(machine),
            *quick.split(),
        ]
        surroundings = {**os.environ, "XDG_CACHE_HOME": str(folder / "no calibration")}
        return subprocess.run(
            command, capture_output=True, text=True, env=surroundings, check=False
        )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("truth")
    works: list[Callable[[], Any]] = [
        lambda: drawn(folder / "stamps"),
        lambda: stalling(looped(None)),
        lambda: stalling(looped(1)),
        lambda: silenced(folder / "run"),
    ]
    with ThreadPoolExecutor(len(works)) as threads:
        done = [each.result() for each in [threads.submit(work) for work in works]]
    return Measured(*done, folder / "run")


def test_figures_are_of_what_was_drawn(measured: Measured) -> None:
    """750 requests: each bound is five standard deviations of its estimate or more."""
    samples, stamps, _ = measured.drawn
    late = float(np.mean([each.written[0] - each.due for each in stamps]))
    found = point_of(
        samples,
        name="p",
        kind="open",
        rate=RATE,
        concurrency=None,
        seconds=SECONDS,
        opens=OPENS,
        goals=(MEDIAN + late,),
        look=LOOK,
        marks=(),
    )
    first, gap = found.figures.first_token, found.figures.inter_token
    assert first is not None and gap is not None and found.figures.request_rate is not None
    mean = MEDIAN * math.exp(SIGMA**2 / 2)
    assert first.p50.value == pytest.approx(MEDIAN + late, rel=0.13)
    assert first.mean.value == pytest.approx(mean + late, rel=0.1)
    assert found.goals[0].share == pytest.approx(0.5, abs=0.1)
    assert gap.mean.value == pytest.approx(GAP, rel=0.12)
    assert found.figures.request_rate.value == pytest.approx(RATE, rel=0.15)


def test_the_client_hears_a_first_token_after_it_was_spoken_and_soon(measured: Measured) -> None:
    """One clock. The n-th to be heard cannot come before the n-th was written."""
    samples, stamps, begin = measured.drawn
    heard, spoken = np.sort(samples.first + begin), np.sort([each.written[0] for each in stamps])
    assert len(heard) == len(spoken) and (heard >= spoken).all()
    assert np.median(heard - spoken) < 0.02


# --- coordinated omission


def point_of_stall(samples: Samples, kind: Any) -> Point:
    return point_of(
        samples,
        name="p",
        kind=kind,
        rate=None,
        concurrency=None,
        seconds=None,
        goals=(0.3,),
        look=LOOK,
        marks=(),
    )


def test_a_stall_is_in_the_figures_of_who_did_not_wait_for_it(measured: Measured) -> None:
    """200 requests 20 ms apart, 5 ms each, a stall of 1.5 s at the 60th: the k-th after it waits
    1.5 s - 20 ms k. By arithmetic 60 of 200 wait more than 0.3 s, the 95th percentile is 1.3 s, the
    mean 0.285 s. A closed loop asks nothing while it waits: one request of 200 is slow, the 95th
    percentile is that of the others, the mean 0.013 s."""
    opened, closed = (
        point_of_stall(measured.opened, "open"),
        point_of_stall(measured.closed, "closed"),
    )
    first = opened.figures.first_token
    asked = COUNT * (1 - opened.goals[0].share)
    assert abs(asked - (STALL - 0.3) / EVERY) <= 6
    assert abs(first.p95.value - (STALL - 0.05 * (COUNT - 1) * EVERY)) < 0.1
    held = STALL / EVERY
    assert abs(first.mean.value - (held * STALL / 2 + (COUNT - held) * BASE) / COUNT) < 0.03
    waits = measured.closed.first - measured.closed.intended
    assert (waits > 0.3).sum() == 1 and abs(waits.max() - STALL) < 0.1
    assert closed.goals[0].share == pytest.approx(1 - 1 / COUNT)
    assert (
        closed.figures.first_token.p95.value < 0.1 and closed.figures.first_token.mean.value < 0.04
    )


# --- a server that falls silent


def test_a_server_that_falls_silent_is_a_stalled_failure_and_keeps_its_points(
    measured: Measured,
) -> None:
    told = measured.silent
    assert told.returncode == 0, told.stderr
    record = validate(
        measured.folder / "8x4" / "record.json", measured.folder / "8x4" / "raw.parquet"
    )
    assert [(one.point, one.kind) for one in record.failures] == [
        ("saturation", "stalled"),
        (None, "stalled"),
    ]
    assert (
        record.failures[0].message == "nothing came for 1 s; 0 of 64 requests were answered before"
    )
    assert "no byte for 1 s" in record.failures[1].message
    assert [(point.name, point.complete) for point in record.points] == [("single", 3)]
    assert "stalled" in told.stdout
