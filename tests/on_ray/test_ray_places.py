"""Where workers find room, in numbers; no Ray."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config import Config
from penstock.errors import CapacityError, UsageError
from penstock.on_ray.cluster import RayCluster, RayNode
from penstock.on_ray.places import WorkerPlaces, place_workers

GPUS = RayCluster((RayNode("a", 16, 4), RayNode("b", 10, 2), RayNode("head", 4, 0)), own=False)
CORES = RayCluster((RayNode("a", 8, 0), RayNode("b", 3, 0)), own=False)


@pytest.mark.parametrize(
    ("cluster", "workers", "asked", "places"),
    [
        (GPUS, None, {}, (6, 4, 1)),
        (GPUS, 3, {}, (3, 4, 1)),
        (GPUS, None, {"tensor_parallel_size": 2}, (3, 8, 2)),
        (GPUS, None, {"tensor_parallel_size": 4}, (1, 16, 4)),
        (GPUS, None, {"device": "cpu"}, (3, 8, 0)),
        (CORES, None, {}, (2, 4, 0)),
        (CORES, 1, {}, (1, 8, 0)),
        (CORES, 5, {}, (5, 2, 0)),
        (CORES, 11, {}, (11, 1, 0)),
    ],
)
def test_places(
    cluster: RayCluster, workers: int | None, asked: dict[str, Any], places: tuple[int, int, int]
) -> None:
    found = place_workers(cluster, workers, Config.of(**asked))
    assert found == WorkerPlaces(*places)
    count, cpus, gpus = places
    assert (
        sum(min(n.cpus // cpus, n.gpus // gpus if gpus else count) for n in cluster.nodes) >= count
    )


@pytest.mark.parametrize(
    ("cluster", "workers", "asked", "kind", "says"),
    [
        (GPUS, 7, {}, CapacityError, "ask for 7, and the Ray cluster has 6"),
        (GPUS, None, {"tensor_parallel_size": 8}, CapacityError, "1 worker of 8 GPUs"),
        (CORES, None, {"device": "cuda"}, CapacityError, r"has 0 \(none\)"),
        (
            CORES,
            12,
            {},
            CapacityError,
            "12 workers ask for a core each, and the Ray cluster has 11",
        ),
        (CORES, 0, {}, UsageError, "--workers must be at least 1"),
    ],
)
def test_no_room(
    cluster: RayCluster,
    workers: int | None,
    asked: dict[str, Any],
    kind: type[Exception],
    says: str,
) -> None:
    with pytest.raises(kind, match=says):
        place_workers(cluster, workers, Config.of(**asked))
