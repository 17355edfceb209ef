"""A Ray cluster of this machine for tests: on free ports, in a folder of its own, without dashboard, token or usage
report, until standard input ends. `python ray_head.py FOLDER CORES` prints its address. Ray's processes have the
environment of this one, so what a test's workers read from it is given here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SUPPORT = Path(__file__).parent
SOURCES = SUPPORT.parents[1] / "src"


def ray_environment(home: Path) -> dict[str, str]:
    """What Ray's processes and its drivers begin with, so that nothing is left in the home folder."""
    return {
        "HOME": str(home), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "PYTHONPATH": os.pathsep.join([str(SOURCES), str(SUPPORT)]),
    }  # fmt: skip


@contextmanager
def ray_head(folder: Path, cores: int, environment: Mapping[str, str]) -> Iterator[str]:
    """The address of a cluster that ends with the block. folder: a short path, since sockets lie in it."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder), str(cores)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, **environment}, text=True,
    )  # fmt: skip
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
        "local", num_cpus=int(cores), include_dashboard=False, logging_level="warning", log_to_driver=False,
        _temp_dir=folder, object_store_memory=100 << 20,
    )  # fmt: skip
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
