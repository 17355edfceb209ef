"""A Ray cluster, joined or started: what it has, whether that is enough, and how it is left. Jobs
and deployments stand on it; it knows neither. Ray is imported inside functions: it takes a second,
and most commands never need it.
"""

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

# bytes: what we send is small; Ray's own would take a third of the machine's memory
OBJECT_STORE = 128 << 20
KNOCK = 10.0  # seconds
# Ray reads these once, when it is imported. Under `uv run` every worker would make its environment
# anew, by a registry.
ENVIRONMENT = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
OWN_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0"}  # a cluster that is there has said so for itself


@dataclass(frozen=True, slots=True)
class RayNode:
    """A machine of a cluster: its address, and how many cores and GPUs Ray may give away there."""

    address: str
    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A cluster that this process is a driver of. own: it was started here, and ends with us."""

    nodes: tuple[RayNode, ...]
    own: bool

    @property
    def gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    @property
    def cpus(self) -> int:
        return sum(node.cpus for node in self.nodes)

    def check_gpus(self, each: int, count: int, what: str) -> None:
        """Raises CapacityError unless `count` times `each` GPUs of one machine are there. what:
        that takes them."""
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
    """Joins the cluster at `address` (`auto`, or HOST:PORT; None: RAY_ADDRESS where that is set,
    else one of this machine's cores and GPUs that is started here and ends with the block).

    environment: settings of Ray's own that this process, and a cluster that it starts, begin with.
    Raises UsageError where Ray isn't installed or differs between here and the cluster,
    CapacityError where no cluster answers.
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

    if ray.is_initialized():  # the caller's own driver, a notebook say: it is for the caller to end
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
    """Raises UsageError where Ray is missing."""
    if find_spec("ray") is None:
        raise UsageError('this needs Ray, which isn\'t here: pip install "penstock[ray]"')


def nodes_without(path: Path) -> list[str]:
    """Returns the addresses of a joined cluster's machines that don't see a path."""
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
    """Makes this process a driver. SIGTERM stays whose it was: Ray would make it a plain exit."""
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
    # its machines have another one
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
    """Raises where nobody listens at HOST:PORT: Ray itself would try for minutes."""
    if "://" in address:
        raise UsageError(
            f"{address} is an address for clients from outside: give HOST:PORT or auto on a machine"
            " of the cluster, as `ray job submit` runs it"
        )
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return  # `auto`: Ray knows where
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
