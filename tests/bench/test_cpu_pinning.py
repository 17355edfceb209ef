"""The server's cores and the client's: apart, told, and given back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.bench.calibrate import machine_key
from penstock.bench.cpu_pinning import away_from, clients_at_once, cores_here, count_all, count_here, server_share
from penstock.bench.machine_probe import machine_of, this_machine
from penstock.bench.server_process import ServerProcess, free_port
from penstock.errors import UsageError

several = pytest.mark.skipif(len(cores_here()) < 2, reason="needs two cores, and a system that pins")


@pytest.mark.parametrize(
    ("cores", "processes", "asked", "server"),
    [
        ([0, 1], 1, None, [0]),
        (list(range(16)), 4, None, list(range(12))),
        ([2, 5, 7], 9, None, [2]),
        ([0, 1, 2, 3], 1, 2, [0, 1]),
        ([3], 1, None, []),
        ([], 1, None, []),
    ],
)
def test_the_server_has_all_but_one_a_client(
    cores: list[int], processes: int, asked: int | None, server: list[int]
) -> None:
    assert server_share(cores, processes, asked) == server


@pytest.mark.parametrize(("cores", "asked"), [([0, 1], 2), ([0, 1], 5), ([0], 1), ([], 1)])
def test_a_client_without_a_core_is_refused(cores: list[int], asked: int) -> None:
    with pytest.raises(UsageError, match="client needs one too"):
        server_share(cores, 1, asked)


def test_a_ceiling_is_of_as_many_processes_as_have_a_core() -> None:
    assert clients_at_once([0, 1], [0], 2) == 1 and clients_at_once([0, 1, 2, 3], [0], 2) == 2
    assert clients_at_once([0], [], 3) == 3  # none is pinned: as `bench calibrate` measured it


def test_cores_that_this_process_may_not_use_count_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen cores, and a container that gives three of them."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 9}, raising=False)
    assert count_here() == 3 and this_machine().cores == 3
    of_three = machine_key()
    monkeypatch.delattr(os, "sched_getaffinity")
    assert count_here() == 16  # macOS
    assert machine_key() != of_three, "a client's ceiling is of the cores that it had"


def test_a_server_that_somebody_else_started_has_the_cores_that_this_process_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`taskset -c 3 penstock bench run http://127.0.0.1:8000` on four cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)  # of which a container gives four
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3} if pid == 1 else {3}, raising=False)
    monkeypatch.setattr("penstock.bench.machine_probe._gpu", lambda visible: None)
    assert (count_here(), count_all()) == (1, 4)
    assert machine_of(None, "http://127.0.0.1:8000", started=False).cores == 4
    assert machine_of(None, None, started=False).cores == 4  # an import
    assert machine_of(None, None, started=True).cores == 1

    def hidden(pid: int) -> set[int]:
        if pid == 1:
            raise PermissionError
        return {3}

    monkeypatch.setattr(os, "sched_getaffinity", hidden)
    assert count_all() == 64
    monkeypatch.delattr(os, "sched_getaffinity")
    assert count_all() == 64  # macOS


@several
def test_what_is_started_inside_runs_elsewhere_and_afterwards_anywhere() -> None:
    before = cores_here()
    ask = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    with away_from(before[:1]):
        assert subprocess.check_output(ask, text=True).strip() == str(before[1:])
    assert cores_here() == before
    with away_from([]):
        assert cores_here() == before


@several
def test_a_server_is_held_to_its_cores(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    last = cores_here()[-1]
    with ServerProcess(command, port, "m", tmp_path / "log", ready="/", cores=(last,)) as server:
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        assert [os.sched_getaffinity(int(each)) for each in [server.pid, *children]] == [{last}, {last}]
