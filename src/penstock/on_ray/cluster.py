"""Joins or starts a Ray cluster. Lists its nodes, checks that they are enough, and leaves it again.
Knows neither jobs nor deployments, which build on it. Functions import Ray themselves, since the
import takes a second and most commands never need it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.errors import CapacityError, UsageError

# bytes of Ray's object store: Penstock's objects are small, and Ray's default is a third of the
# machine's memory
OBJECT_STORE = 128 << 20
KNOCK = 10.0  # seconds to wait for a connection to the cluster's address
# Ray reads environment variables once, at its import. Without this one every worker under `uv run`
# would install its Python environment again.
ENVIRONMENT = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
# set only for clusters that are started here, since a running cluster has its own setting
OWN_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0"}


@dataclass(frozen=True, slots=True)
class RayNode:
    """A machine of a cluster: its address, and the cores and GPUs that Ray may assign there."""

    address: str
    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A cluster that this process is a driver of. own: True if it was started here, and ends with
    this process."""

    nodes: tuple[RayNode, ...]
    own: bool

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    @property
    def cpus(self) -> int:
        return sum(node.cpus for node in self.nodes)

    def check_gpus(self, each: int, count: int, what: str) -> None:
        """Raises CapacityError unless the cluster has room for `count` sets of `each` GPUs, with
        the GPUs of a set on one machine. what: name of the user of one set in the error, as
        "replica"."""
        if not each or count <= sum(node.gpus // each for node in self.nodes):
            return
        has = (
            ", ".join(f"{node.gpus} at {node.address}" for node in self.nodes if node.gpus)
            or "none"
        )
        asked = (
            f"{count} {what}{'s' * (count > 1)} of {each} GPU{'s' * (each > 1)}, each on one"
            " machine,"
        )
        raise CapacityError(
            f"{asked} ask for {count * each}, and the Ray cluster has {self.gpus} ({has}): ask for"
            " fewer, or start more nodes first"
        )


@contextmanager
def ray_cluster(
    address: str | None, environment: Mapping[str, str] | None = None
) -> Iterator[RayCluster]:
    """Joins the cluster at `address` (`auto` or HOST:PORT). With None joins RAY_ADDRESS if it is
    set, else starts a cluster of this machine's cores and GPUs that ends with the block.

    environment: Ray settings for this process and for a cluster that it starts. Raises UsageError
    if Ray isn't installed or its version differs from the cluster's, CapacityError if no cluster
    answers.
    """
    needs_ray()
    own = not (address or os.environ.get("RAY_ADDRESS"))
    for name, value in {
        **ENVIRONMENT,
        **(OWN_ENVIRONMENT if own else {}),
        **(environment or {}),
    }.items():
        os.environ.setdefault(name, value)
    import ray

    # the caller, a notebook for example, has connected to Ray before, and stays connected
    if ray.is_initialized():
        yield RayCluster(_nodes(), own=False)
        return
    folder = tempfile.mkdtemp(prefix="penstock-ray-") if own else None
    try:
        _init(address, folder, environment or {})
        yield RayCluster(_nodes(), own)
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def needs_ray() -> None:
    """Raises UsageError if Ray is not installed."""
    if find_spec("ray") is None:
        raise UsageError('this needs Ray, which isn\'t here: pip install "penstock[ray]"')


def nodes_without(path: Path) -> list[str]:
    """Returns the addresses of the joined cluster's machines on which `path` doesn't exist."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0)(os.path.exists)
    alive = [node for node in ray.nodes() if node["Alive"]]
    each = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in alive]
    seen = ray.get([look.options(scheduling_strategy=there).remote(str(path)) for there in each])
    return [
        node["NodeManagerAddress"] for node, there in zip(alive, seen, strict=True) if not there
    ]


def _init(address: str | None, folder: str | None, environment: Mapping[str, str]) -> None:
    """Connects this process as a driver. Restores the handler of SIGTERM, which Ray replaces by a
    plain exit."""
    import ray

    if not folder:
        _check_answers(address or os.environ["RAY_ADDRESS"])
    main = threading.current_thread() is threading.main_thread()
    usual = signal.getsignal(signal.SIGTERM)
    own: dict[str, Any] = {
        "_temp_dir": folder,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE,
    }
    # the machines of a joined cluster have their own environment variables
    joins = {"runtime_env": {"env_vars": dict(environment)}} if environment else {}
    try:
        ray.init(
            "local" if folder else address, logging_level="warning", **own if folder else joins
        )
    except (RuntimeError, ConnectionError, ValueError, AssertionError) as error:
        raise _not_joined(address or os.environ.get("RAY_ADDRESS"), error) from error
    finally:
        if main:
            signal.signal(signal.SIGTERM, usual)


def _check_answers(address: str) -> None:
    """Raises CapacityError if nothing listens at HOST:PORT. Ray itself would try to connect for
    minutes."""
    if "://" in address:
        raise UsageError(
            f"{address} is an address for clients from outside: give HOST:PORT or auto on a machine"
            " of the cluster, as `ray job submit` runs it"
        )
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return  # `auto`: Ray finds the address
    try:
        socket.create_connection((host, int(port)), KNOCK).close()
    except (OSError, OverflowError) as error:
        raise _not_joined(address, error) from error


def _not_joined(address: str | None, error: Exception) -> UsageError | CapacityError:
    said = " ".join(str(error).split())
    if "ersion mismatch" in said:
        return UsageError(
            f"the cluster at {address} runs another Ray or Python than this process ({said[:300]}):"
            " use the same on both"
        )
    if address is None:
        return CapacityError(f"Ray could not be started here ({said[:300]}): its logs say more")
    return CapacityError(
        f"no Ray cluster answers at {address} ({said[:200]}): start one by `ray start --head`, or"
        " name another address"
    )


def _nodes() -> tuple[RayNode, ...]:
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    return tuple(
        RayNode(
            node["NodeManagerAddress"],
            int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("GPU", 0)),
        )
        for node in alive
    )
