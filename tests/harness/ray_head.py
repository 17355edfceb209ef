"""A Ray cluster of this machine for tests: on free ports, in a folder of its own, without
dashboard, token or usage report, until standard input ends. `python ray_head.py FOLDER CORES`
prints its address. Ray's processes have the environment of this one, so what a test's workers read
from it is given here."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from penstock.on_ray.run_service import serve_environment

SLOW = "slow"  # a file in FAKE_ENGINES: as long as it is there, jobs' samples take a while
HERE = Path(__file__).parent
ON_PATH = (HERE.parents[1] / "src", HERE.parent / "support", HERE)


def ray_environment(folder: Path) -> dict[str, str]:
    """What Ray's processes and its drivers begin with: all that they leave is in the folder, and no
    port that another cluster of this machine has taken is asked for."""
    places = {"HOME": folder / "home", "TMPDIR": folder / "tmp", "HAPROXY": folder / "ha"}
    for place in places.values():
        place.mkdir()
    ports = (
        "RAY_SERVE_HAPROXY_METRICS_PORT",
        "RAY_SERVE_HAPROXY_STATS_PORT",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    )
    return {
        **serve_environment(),
        **dict(zip(ports, map(str, free_ports(3)), strict=True)),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(places["HAPROXY"] / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(places["HAPROXY"] / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(places["HAPROXY"]),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(places["HAPROXY"] / "server-state"),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "HOME": str(places["HOME"]),
        "TMPDIR": str(places["TMPDIR"]),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "PYTHONPATH": os.pathsep.join(map(str, ON_PATH)),
    }


def free_ports(count: int) -> list[int]:
    """Ports that nobody has, at this moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def job_cluster(cores: int) -> Iterator[tuple[str, Path, dict[str, str]]]:
    """A cluster for ray_job.py: its address, its folder, gone at the end, and what its drivers
    begin with."""
    folder = Path(tempfile.mkdtemp(prefix="pr-", dir="/tmp"))  # sockets want a short path
    try:
        (folder / "engines").mkdir()
        environment = ray_environment(folder) | {"FAKE_ENGINES": str(folder / "engines")}
        with ray_head(folder / "ray", cores, environment) as address:
            yield address, folder, environment
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_head(folder: Path, cores: int, environment: Mapping[str, str]) -> Iterator[str]:
    """The address of a cluster that ends with the block. folder: a short path, since sockets lie in
    it."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder), str(cores)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address, "Ray did not start: what it says is above"
        yield address
    finally:
        process.stdin.close()
        process.wait()


def main(folder: str, cores: str) -> None:
    import ray

    ray.init(
        "local",
        num_cpus=int(cores),
        include_dashboard=False,
        logging_level="warning",
        log_to_driver=False,
        _temp_dir=folder,
        object_store_memory=100 << 20,
    )
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
