"""Divides a Ray cluster's cores and GPUs between workers. Knows only counts of cores and GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import Config
from penstock.errors import CapacityError, UsageError
from penstock.on_ray.cluster import RayCluster


@dataclass(frozen=True, slots=True)
class WorkerPlaces:
    """A number of workers, and the cores and GPUs that each gets on one machine."""

    workers: int
    cpus: int
    gpus: int

    def __str__(self) -> str:
        gpus = f"{self.gpus} GPU{'s' * (self.gpus > 1)} and " if self.gpus else ""
        each = f"{gpus}{self.cpus} core{'s' * (self.cpus != 1)}"
        return f"{self.workers} worker{'s' * (self.workers > 1)} on Ray, {each} each"


def place_workers(cluster: RayCluster, workers: int | None, config: Config) -> WorkerPlaces:
    """Returns the number of workers and their cores and GPUs. workers: the wanted number; None: as
    many as the GPUs allow, or one per machine without GPUs. All GPUs of a worker are on one
    machine. Raises CapacityError if the cluster has too few.
    """
    if workers is not None and workers < 1:
        raise UsageError(f"--workers must be at least 1, not {workers}", param="workers")
    device, each = config.model.device, config.parallel.tensor_parallel_size
    if device == "cuda" or (device == "auto" and cluster.gpus):
        room = [(node, node.gpus // each) for node in cluster.nodes if node.gpus >= each]
        count = sum(here for _, here in room) if workers is None else workers
        cluster.check_gpus(each, max(1, count), "worker")
        return WorkerPlaces(count, min(node.cpus // here for node, here in room), each)
    count = sum(node.cpus > 0 for node in cluster.nodes) if workers is None else workers
    if count > cluster.cpus or not count:
        raise CapacityError(
            f"{max(1, count)} workers ask for a core each, and the Ray cluster has {cluster.cpus}:"
            " lower --workers, or start more nodes first"
        )
    return WorkerPlaces(count, _cores(cluster, count), 0)


def _cores(cluster: RayCluster, workers: int) -> int:
    """Returns the largest number of cores per worker with which all workers fit on the cluster's
    machines."""
    most = max(node.cpus for node in cluster.nodes)
    return next(
        c for c in range(most, 0, -1) if sum(node.cpus // c for node in cluster.nodes) >= workers
    )
