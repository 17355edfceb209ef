"""Client processes that die, and loads that do: told, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
from hostile_server import HostileServer

from penstock.bench import worker_pool
from penstock.bench.endpoint import target_of
from penstock.bench.run_load import Load, run_load, shares
from penstock.bench.worker_pool import WorkerProcess
from penstock.bench.worker_protocol import PlannedRequest
from penstock.errors import EngineError


def load_of(names: list[str], **changed: object) -> Load:
    asks = [PlannedRequest(0.0, json.dumps({"behave": name}).encode(), 4, 3) for name in names]
    return Load(**{
        "asks": asks, "closed": None, "stop_after": 60.0, "stall": 60.0, "window": (0.0, 60.0), **changed,
    })  # fmt: skip


def test_asks_are_shared_out_and_none_is_lost() -> None:
    load = load_of(["good"] * 11, closed=5)
    for count in (1, 2, 3, 9):
        specs = shares(target_of("h"), load, count)
        assert len(specs) == min(count, 5) and sum(spec.closed or 0 for spec in specs) == 5
        assert sorted(number for spec in specs for number in spec.number) == list(range(11))
        assert sum(spec.connections for spec in specs) == 5


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[WorkerProcess]:
    """The workers that are started, as they come."""
    found: list[WorkerProcess] = []
    real = worker_pool.start_worker

    def noted() -> WorkerProcess:
        found.append(real())
        return found[-1]

    monkeypatch.setattr(worker_pool, "start_worker", noted)
    return found


def test_a_client_process_that_dies_is_told_with_its_last_words(started: list[WorkerProcess]) -> None:
    def kill(_: object) -> None:
        started[0].errors.write(b"trace\nno more memory\n")
        started[0].errors.flush()
        started[0].process.kill()

    with HostileServer() as server, pytest.raises(EngineError, match="ended with code -9: no more memory"):
        run_load(target_of(server.url), load_of(["nothing"] * 2), point="p", start=0, processes=2, progress=kill)


WORKER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
SERVER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
while True:
    time.sleep(1)
"""


def test_a_worker_that_heeds_no_signal_ends_with_the_server_of_a_killed_run() -> None:
    """The run is gone: its pipe ends. The worker holds the guard's stdout open for as long as it lives."""
    held = [sys.executable, "-m", "penstock.bench.process_guard", "all"]
    command = [*held, sys.executable, "-c", SERVER, WORKER]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert guard.stdout is not None and guard.stdout.readline() == b"up\n"
        guard.communicate(timeout=14)  # closes the pipe; ends when nobody is left
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(guard.pid, signal.SIGKILL)
