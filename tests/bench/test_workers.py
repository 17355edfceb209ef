"""Client processes that die, and loads that do: told, and nothing is left behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO

import pytest
from hostile_server import HostileServer

from penstock.bench import worker_pool
from penstock.bench.endpoint import target_of
from penstock.bench.run_load import Load, PlannedRequest, run_load, shares
from penstock.bench.worker_protocol import WorkerProgress, WorkerReady, WorkerStart, WorkerStop, pack, read
from penstock.errors import EngineError


def load_of(names: list[str], **changed: object) -> Load:
    asks = [PlannedRequest(0.0, json.dumps({"behave": name}).encode(), 4, 3) for name in names]
    return Load(**{
        "asks": asks, "closed": None, "stop_after": 60.0, "stall": 60.0, "window": (0.0, 60.0), **changed,
    })  # fmt: skip


def test_messages_come_out_of_frames_as_they_went_in() -> None:
    spec = shares(target_of("h"), load_of(["good", "nothing"]), 1)[0]
    pipe = io.BytesIO(
        b"".join(map(pack, (spec, WorkerStart(1.5), WorkerStop(), WorkerReady(3)))) + pack(WorkerStop())[:-1]
    )
    assert [read(pipe) for _ in range(5)] == [spec, WorkerStart(1.5), WorkerStop(), WorkerReady(3), None]


def test_asks_are_shared_out_and_none_is_lost() -> None:
    load = load_of(["good"] * 11, closed=5)
    for count in (1, 2, 3, 9):
        specs = shares(target_of("h"), load, count)
        assert len(specs) == min(count, 5) and sum(spec.closed or 0 for spec in specs) == 5
        assert sorted(number for spec in specs for number in spec.number) == list(range(11))
        assert sum(spec.connections for spec in specs) == 5


def test_a_client_process_that_dies_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(errors: IO[bytes]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import sys; sys.exit('no more memory')"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)

    monkeypatch.setattr(worker_pool, "_client", dying)
    with pytest.raises(EngineError, match="ended with code 1: no more memory"):
        run_load(target_of("127.0.0.1:9"), load_of(["good"]), point="p", start=0, processes=2, progress=None)


def test_a_client_ends_when_its_load_goes_away_in_the_middle_of_a_point() -> None:
    with HostileServer() as server, tempfile.TemporaryFile() as errors:
        process = worker_pool._client(errors)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(pack(shares(target_of(server.url), load_of(["nothing"]), 1)[0]))
        process.stdin.flush()
        assert read(process.stdout) == WorkerReady(1)  # type: ignore[arg-type]
        process.stdin.write(pack(WorkerStart(time.monotonic())))
        process.stdin.flush()
        assert isinstance(read(process.stdout), WorkerProgress)  # type: ignore[arg-type]
        process.stdin.close()
        assert process.wait(30) == 0
        process.stdout.close()


def test_an_interrupted_load_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = worker_pool._client

    def noted(errors: IO[bytes]) -> subprocess.Popen[bytes]:
        started.append(real(errors))
        return started[-1]

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker_pool, "_client", noted)
    with HostileServer() as server, pytest.raises(KeyboardInterrupt):
        load = load_of(["nothing"] * 2)
        run_load(target_of(server.url), load, point="p", start=0, processes=2, progress=interrupt)
    assert len(started) == 2 and all(process.poll() is not None for process in started)


def test_a_load_ends_when_whoever_hears_it_has_enough() -> None:
    """Its samples are there all the same: what went on is unfinished."""
    with HostileServer() as server:
        load = load_of(["good", "nothing"])
        samples, _ = run_load(
            target_of(server.url), load, point="p", start=0, processes=2,
            progress=lambda now: bool(now.ended and now.in_flight),
        )  # fmt: skip
    assert sorted(samples.outcome) == ["ok", "unfinished"]


WORKER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
SERVER = """
import signal, subprocess, sys, time
def end(*_):
    time.sleep(0.3)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
while True:
    time.sleep(1)
"""


def test_a_worker_that_heeds_no_signal_ends_with_the_server_of_a_killed_run() -> None:
    """The run is gone: its pipe ends. The worker holds the guard's stdout open for as long as it lives."""
    command = [
        sys.executable,
        "-m",
        "penstock.bench.process_guard",
        "SIGTERM",
        "all",
        sys.executable,
        "-c",
        SERVER,
        WORKER,
    ]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert guard.stdout is not None and guard.stdout.readline() == b"up\n"
        guard.communicate(timeout=14)  # closes the pipe; ends when nobody is left. The guard's own patience is longer
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(guard.pid, signal.SIGKILL)
