"""Measures the client's own limits on this machine. The limits are the streamed events and requests
a second that 1, 2, 4, ... client processes can receive.

    events     all streams get an event every 10 ms; the highest rate, within 25 %, at which the
               event loop's p99 lag is at most 5 ms
    requests   answers of one token, sent as fast as slots come free

The server (null_server.py) uses cores of the same machine, so the measured limits are rather too
low. Knows no engine.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from penstock import __version__
from penstock.almanac.record import LAG
from penstock.almanac.samples import OK
from penstock.bench.cpu_pinning import count_here, processor
from penstock.bench.endpoint import Endpoint
from penstock.bench.null_server import NullPlan, NullServer
from penstock.bench.run_folder import write_whole
from penstock.bench.run_load import ClientReport, run_load
from penstock.bench.worker_protocol import Load, PlannedRequest
from penstock.errors import EngineError, RecordError

STEP = 0.01
# events a second to try, for each client process; up to 413,000
RATES = [1_000 * 1.25**power for power in range(28)]
THROUGH = 0.95  # share of the sent events that must arrive in time for a rate to pass
# numbers of concurrent requests to try, for each process; the first with an acceptable event loop
# lag counts
SLOTS = (32, 8, 1)
PROMPT = list(range(128))


class Rung(msgspec.Struct, frozen=True):
    """The measured limits of a number of client processes. events, requests: highest rates per
    second, all processes together; 0: the event loop lagged at every rate. *_cpu: microseconds of
    CPU time per event or request."""

    processes: int
    events: float
    events_lag: float
    event_cpu: float
    requests: float
    requests_lag: float
    request_cpu: float


class Calibration(msgspec.Struct, frozen=True):
    """The client's measured limits on one machine. when: the time of measurement, UTC."""

    cpu: str
    cores: int
    python: str
    penstock: str
    when: str
    rungs: list[Rung]

    def of(self, processes: int) -> Rung | None:
        """Returns the limits of this number of processes, else of the next lower number that was
        measured."""
        lower = [rung for rung in self.rungs if rung.processes <= processes]
        return max(lower, key=lambda rung: rung.processes) if lower else None


class Trial(msgspec.Struct, frozen=True):
    passed: bool
    events: float
    lag: float
    cpu: float


def calibrate(
    *, most: int | None = None, seconds: float = 3.0, say: Callable[[str], None] = print
) -> Calibration:
    """Measures with 1, 2, 4, ... processes, up to `most` (None: the number of usable cores). Takes
    about 40 s for each number. Raises EngineError if the event loop lagged at every rate: a limit
    of 0 would be meaningless.
    """
    cores = count_here()
    most = cores if most is None else most
    counts = [2**power for power in range(most.bit_length()) if 2**power < most] + [most]
    rungs = []
    for count in counts:
        rungs.append(_rung(count, seconds))
        say(line(rungs[-1]))
        if not (rungs[-1].events and rungs[-1].requests):
            raise EngineError(
                f"this machine is too busy to be measured: {named(count)} never kept time; nothing"
                " was written, try again when it is quiet"
            )
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Calibration(processor(), cores, platform.python_version(), __version__, now, rungs)


def named(processes: int) -> str:
    return f"{processes} process{'es' if processes > 1 else ''}"


def line(rung: Rung) -> str:
    return (
        f"{named(rung.processes)}: {rung.events:,.0f} events/s (lag p99 {1e3 * rung.events_lag:.1f}"
        f" ms, {rung.event_cpu:.1f} us of a core each), {rung.requests:,.0f} requests/s (lag p99"
        f" {1e3 * rung.requests_lag:.1f} ms, {rung.request_cpu:.0f} us each)"
    )


def _rung(processes: int, seconds: float) -> Rung:
    best = _search(lambda rate: _events(processes, rate, seconds), processes)
    slots, requests = _requests(processes, seconds)
    heard = requests.requests_per_second if slots else 0.0
    asked = max(1.0, requests.requests_per_second * requests.seconds)
    return Rung(
        processes,
        best.events if best.passed else 0.0,
        best.lag,
        best.cpu,
        heard,
        requests.lag_p99,
        1e6 * requests.cpu / asked,
    )


def _search(attempt: Callable[[float], Trial], processes: int) -> Trial:
    """Returns the trial at the highest of RATES that passes, by bisection; a failed trial if none
    passes. A failing rate is tried twice, because another process may have disturbed the first try.
    """
    best = Trial(False, 0.0, 0.0, 0.0)
    low, high = 0, len(RATES)  # rates below index `low` pass, rates from `high` on fail
    while low < high:
        middle = (low + high) // 2
        trial = attempt(RATES[middle] * processes)
        if not trial.passed:
            trial = attempt(RATES[middle] * processes)
        low, high = (middle + 1, high) if trial.passed else (low, middle)
        best = trial if trial.passed or not best.passed else best
    return best


def _events(processes: int, rate: float, seconds: float) -> Trial:
    streams = max(processes, round(rate * STEP))
    tokens = max(2, round(seconds / STEP))
    body = json.dumps({"prompt": PROMPT, "max_tokens": tokens, "stream": True}).encode()
    asks = [PlannedRequest(0.0, body, len(PROMPT), tokens) for _ in range(streams)]
    limit = 4 * seconds + 10
    load = Load(asks, None, limit, limit, (0.0, limit))
    with NullServer(NullPlan(step=STEP), processes) as server:
        samples, seen = run_load(
            Endpoint("127.0.0.1", server.port),
            load,
            point="calibrate",
            start=0,
            processes=processes,
        )
    wrong = np.flatnonzero(samples.outcome != OK)
    if len(wrong):
        raise RecordError(f"the null server was misheard: {next(iter(seen.troubles.values()))}")
    # Count only the time in which all streams flow: connecting and ending do not measure the
    # client.
    flowing = float(np.median(samples.end - samples.first))
    events = streams * (tokens - 1) / flowing
    cpu = 1e6 * seen.cpu / float(samples.events.sum())
    through = events >= THROUGH * rate
    return Trial(through and seen.lag_p99 <= LAG, events, seen.lag_p99, cpu)


def _requests(processes: int, seconds: float) -> tuple[int, ClientReport]:
    """Returns the accepted number of concurrent requests per process, one of SLOTS, and the
    clients' report. The number is 0 if the event loop lagged at each."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1, "stream": True}).encode()
    asks = [PlannedRequest(math.nan, body, len(PROMPT), 1)] * round(10_000 * processes * seconds)
    with NullServer(NullPlan(), processes) as server:
        target = Endpoint("127.0.0.1", server.port)
        # try each number twice: another process may have disturbed the first try
        for slots in [each for each in SLOTS for _ in range(2)]:
            load = Load(asks, slots * processes, seconds, 4 * seconds + 10, (0.0, seconds))
            _, seen = run_load(target, load, point="calibrate", start=0, processes=processes)
            if seen.lag_p99 <= LAG:
                return slots, seen
    return 0, seen


# --- the calibration, stored on disk for later load levels


def ceiling_path() -> Path:
    """Returns the calibration's path in the user's cache folder. Its name depends on this machine,
    its CPU and the usable cores."""
    told = f"{platform.node()}/{processor()}/{count_here()}"
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return (
        Path(cache) / "penstock" / f"client.{hashlib.sha256(told.encode()).hexdigest()[:16]}.json"
    )


def write_ceiling(ceiling: Calibration) -> Path:
    """Writes a calibration into the user's cache folder and returns its path."""
    path = ceiling_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, msgspec.json.format(msgspec.json.encode(ceiling), indent=2).decode())
    return path


def read_ceiling() -> Calibration | None:
    """Returns this machine's calibration, or None. Raises RecordError for an invalid file."""
    path = ceiling_path()
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Calibration)
    except (OSError, msgspec.DecodeError) as error:
        raise RecordError(
            f"{path} holds no calibration ({error}): run `penstock bench calibrate` again"
        ) from error
