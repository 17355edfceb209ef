"""The server's cores and the client's: apart, told, and given back."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from penstock.bench.cpu_pinning import cores_here, server_share
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


@several
def test_a_server_is_held_to_its_cores(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    last = cores_here()[-1]
    with ServerProcess(command, port, "m", tmp_path / "log", ready="/", cores=(last,)) as server:
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        assert [os.sched_getaffinity(int(each)) for each in [server.pid, *children]] == [{last}, {last}]
