"""What the bench says of a server whose truth is known: the real client, a server with drawn times,
real time.

Loads go beside each other (8 s, mostly waiting):

    drawn     an open loop, drawn as a run's are; first tokens lognormal, gaps exponential: what is
    drawn is true
    stall     a server that stops once for 1.5 s, met by an open loop and a closed one
    silence   one that stops for good, met by `penstock bench run URL`

A busy machine makes client and server late, never early. `make test` asserts what holds at any
pace: no time is less than what the server stamped. How near the figures come to the truth is
asserted by tests `at_length`: there the mean of the server's own lateness is added to the truth;
what the client adds is not. That intervals of such samples cover is shown without a client
(tests/almanac/test_intervals.py).
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from at_length import at_length
from bench_runs import MACHINE
from growing_patience import patiently
from made_samples import LOOK
from timed_server import Draw, Stamp, TimedPlan, read_stamps, timed_server

from penstock.almanac.figures import point_of
from penstock.almanac.record import Point, Record
from penstock.almanac.samples import Samples
from penstock.almanac.validate import validate
from penstock.bench import worker_pool
from penstock.bench.endpoint import Endpoint
from penstock.bench.request_schedule import arrivals
from penstock.bench.run_load import run_load
from penstock.bench.worker_protocol import Load, PlannedRequest

MEDIAN, SIGMA, GAP, TOKENS = 0.4, 0.5, 0.05, 4  # of the drawn requests
RATE, OPENS, SECONDS = 150.0, 1.0, 5.0
EVERY, COUNT, BASE, STALL, STALL_AT = 0.02, 200, 0.005, 1.5, 60  # of the server that stalls once
EARLY = 0.001  # the server's timers may be early by half of it
NEARLY = 0.9999  # a figure is rounded to six digits


class Drawn(NamedTuple):
    """begin: of the point, by the clock that the stamps have."""

    samples: Samples
    stamps: list[Stamp]
    begin: float


class Silenced(NamedTuple):
    stall: float
    folder: Path
    told: subprocess.CompletedProcess[str]

    def record(self) -> Record:
        shape = self.folder / "8x4"
        return validate(shape / "record.json", shape / "raw.parquet")


class Measured(NamedTuple):
    drawn: Drawn
    opened: Samples
    closed: Samples
    silent: Silenced


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


def silenced(folder: Path) -> Silenced:
    """A run against a server that falls silent when 40 requests have come: at most 14 before
    everything at once. A machine that is silent by itself for as long as the run waits, and so
    stalls an earlier point, is given more time."""
    machine = folder / "machine.json"  # whatever this one has
    machine.write_text(MACHINE.model_dump_json())

    def trial(stall: float) -> Silenced:
        found = Silenced(stall, folder / f"{stall}", _silenced(folder / f"{stall}", machine, stall))
        assert found.told.returncode == 0, found.told.stderr
        failures = found.record().failures
        assert failures and failures[0].point == "saturation"
        return found

    return patiently(trial)


def _silenced(out: Path, machine: Path, stall: float) -> subprocess.CompletedProcess[str]:
    words = (
        "--model null --shape 8x4 --goal 1 --bisections 1 --short --no-ladder --warm-up 0.2"
        " --window 0.6 --longest 600 --drain 0.3 --at-once 64 --alone 3 --enough 10"
    )
    with timed_server(TimedPlan(first=Draw("fixed", 0.1), stall_at=40, stall_for=1e9)) as server:
        url = f"http://127.0.0.1:{server.port}"
        command = [sys.executable, "-m", "penstock", "bench", "run", url, *words.split()]
        places = ["--stall", str(stall), "--out", str(out), "--machine", str(machine)]
        surroundings = {**os.environ, "XDG_CACHE_HOME": str(out.parent / "no calibration")}
        return subprocess.run(
            command + places, capture_output=True, text=True, env=surroundings, check=False
        )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("truth")
    works: list[Callable[[], Any]] = [
        lambda: drawn(folder / "stamps"),
        lambda: stalling(looped(None)),
        lambda: stalling(looped(1)),
        lambda: silenced(folder),
    ]
    with ThreadPoolExecutor(len(works)) as threads:
        done = [each.result() for each in [threads.submit(work) for work in works]]
    return Measured(*done)


def point(samples: Samples, kind: Any, goal: float, **more: Any) -> Point:
    usual = {"rate": None, "concurrency": None, "seconds": None, "look": LOOK, "marks": ()}
    return point_of(samples, name="p", kind=kind, goals=(goal,), **{**usual, **more})


def test_the_client_hears_nothing_before_it_was_spoken(measured: Measured) -> None:
    """One clock. The n-th to be heard cannot come before the n-th was written, nor after less time
    since its intended start than the server had it."""
    samples, stamps, begin = measured.drawn
    for heard, at in ((samples.first, 0), (samples.end, -1)):
        spoken = np.array([each.written[at] for each in stamps])
        came = np.array([each.came for each in stamps])
        assert len(heard) == len(spoken)
        assert (np.sort(heard + begin) >= np.sort(spoken)).all()
        assert (np.sort(heard - samples.intended) >= np.sort(spoken - came)).all()
    assert (np.sort(samples.actual + begin) <= np.sort([each.came for each in stamps])).all()
    assert (samples.events == TOKENS).all()


def test_figures_are_no_less_than_the_servers_stamps(measured: Measured) -> None:
    """Of the whole load, so that both sides have the same requests."""
    samples, stamps, _ = measured.drawn
    whole = replace(samples, window=np.ones(len(samples), bool))
    held = np.array([each.written[0] - each.came for each in stamps])
    found = point(whole, "open", MEDIAN)
    first, share = found.figures.first_token, found.goals[0].share
    assert found.complete == len(stamps)
    assert first.mean.value >= held.mean() * NEARLY
    assert first.p50.value >= np.quantile(held, 0.5) * NEARLY
    assert first.p99.value >= np.quantile(held, 0.99) * NEARLY
    assert share * NEARLY <= (held <= MEDIAN).mean()


@at_length
def test_figures_are_of_what_was_drawn(measured: Measured) -> None:
    """750 requests: each bound is five standard deviations of its estimate or more."""
    samples, stamps, begin = measured.drawn
    late = float(np.mean([each.written[0] - each.due for each in stamps]))
    steady = {"rate": RATE, "seconds": SECONDS, "opens": OPENS}
    found = point(samples, "open", MEDIAN + late, **steady)
    first, gap = found.figures.first_token, found.figures.inter_token
    assert first is not None and gap is not None and found.figures.request_rate is not None
    mean = MEDIAN * math.exp(SIGMA**2 / 2)
    assert first.p50.value == pytest.approx(MEDIAN + late, rel=0.13)
    assert first.mean.value == pytest.approx(mean + late, rel=0.1)
    assert found.goals[0].share == pytest.approx(0.5, abs=0.1)
    assert gap.mean.value == pytest.approx(GAP, rel=0.12)
    assert found.figures.request_rate.value == pytest.approx(RATE, rel=0.15)
    spoken = np.sort([each.written[0] for each in stamps])
    assert np.median(np.sort(samples.first + begin) - spoken) < 0.02


# --- coordinated omission


def test_a_stall_is_in_the_figures_of_who_did_not_wait_for_it(measured: Measured) -> None:
    """200 requests 20 ms apart, 5 ms each, a stall of 1.5 s at the 60th: the k-th after it waits
    1.5 s - 20 ms k at least, so that 60 of 200 wait more than 0.3 s."""
    samples = measured.opened
    least = np.full(COUNT, BASE)
    behind = np.arange(COUNT - STALL_AT + 1)
    least[STALL_AT - 1 :] = np.maximum(BASE, STALL - EVERY * behind)
    least -= EARLY
    assert (samples.first - samples.intended >= least).all()
    found = point(samples, "open", 0.3)
    first = found.figures.first_token
    assert found.goals[0].share <= 1 - (STALL - 0.3) / EVERY / COUNT
    assert first.p95.value >= np.quantile(least, 0.95) * NEARLY > 1.2
    assert first.mean.value >= least.mean() * NEARLY > 0.28


def test_a_closed_loop_asks_nothing_while_it_waits(measured: Measured) -> None:
    """One request is open at a time, and one of 200 meets the stall."""
    samples = measured.closed
    assert (samples.intended[1:] == samples.end[:-1]).all()
    assert samples.first[STALL_AT - 1] - samples.intended[STALL_AT - 1] >= STALL - EARLY
    assert point(samples, "closed", 0.3).goals[0].share <= 1 - 1 / COUNT


@at_length
def test_the_figures_of_a_stall_are_those_of_arithmetic(measured: Measured) -> None:
    """The open loop's 95th percentile is 1.3 s, its mean 0.285 s. In the closed loop one request of
    200 is slow, the 95th percentile is that of the others, the mean 0.013 s."""
    opened, closed = point(measured.opened, "open", 0.3), point(measured.closed, "closed", 0.3)
    first, behind = opened.figures.first_token, closed.figures.first_token
    assert abs(COUNT * (1 - opened.goals[0].share) - (STALL - 0.3) / EVERY) <= 6
    assert abs(first.p95.value - (STALL - 0.05 * (COUNT - 1) * EVERY)) < 0.1
    held = STALL / EVERY
    assert abs(first.mean.value - (held * STALL / 2 + (COUNT - held) * BASE) / COUNT) < 0.03
    waits = measured.closed.first - measured.closed.intended
    assert (waits > 0.3).sum() == 1 and abs(waits.max() - STALL) < 0.1
    assert closed.goals[0].share == pytest.approx(1 - 1 / COUNT)
    assert behind.p95.value < 0.1 and behind.mean.value < 0.04


def test_a_client_that_is_late_counts_from_the_intended_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A load that began 1 s before its client was told to send."""
    monkeypatch.setattr(worker_pool, "LEAD", -1.0)
    asks = [PlannedRequest(EVERY * at, body(1), 4, 1) for at in range(20)]
    load = Load(asks, None, 300.0, 300.0, (0.0, 300.0))
    with timed_server(TimedPlan(first=Draw("fixed", BASE))) as server:
        target = Endpoint("127.0.0.1", server.port)
        samples, seen = run_load(target, load, point="p", start=0, processes=1)
    late = 1.0 - EVERY * np.arange(20)
    assert (samples.actual - samples.intended >= late).all()
    found = point(samples, "open", 0.5).figures
    assert found.first_token.mean.value >= (late.mean() + BASE - EARLY) * NEARLY
    gained = found.first_token.mean.value - found.first_token_actual.mean.value
    assert gained >= late.mean() * NEARLY
    assert seen.late_p99 >= late.max() * 0.98 and seen.look(None, None).short


# --- a server that falls silent


def test_a_server_that_falls_silent_is_a_stalled_failure_and_keeps_its_points(
    measured: Measured,
) -> None:
    stall, _, told = measured.silent
    record = measured.silent.record()
    assert [(one.point, one.kind) for one in record.failures] == [
        ("saturation", "stalled"),
        (None, "stalled"),
    ]
    first, second = (one.message for one in record.failures)
    assert re.fullmatch(
        f"nothing came for {stall:g} s; \\d+ of 64 requests were answered before", first
    )
    assert f"no byte for {stall:g} s" in second
    assert [(point.name, point.complete) for point in record.points] == [("single", 3)]
    assert "stalled" in told.stdout
