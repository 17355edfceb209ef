"""What is said where there is no Ray, no cluster, or another one; no Ray is started."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import penstock.on_ray.cluster as room
from penstock.errors import CapacityError, PenstockError, UsageError
from penstock.on_ray.cluster import RayCluster, RayNode, ray_cluster


def test_ray_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install \"penstock\[ray\]\""), ray_cluster(None):
        pass


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("HERE", "no Ray cluster answers at HERE .*start one by `ray start --head`"),
        ("ray://x:1", "HOST:PORT or auto"),
    ],
)
def test_nobody_is_there(
    address: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="ray isn't installed: make packaging")
    for name in {**room.ENVIRONMENT, **room.OWN_ENVIRONMENT}:
        monkeypatch.setenv(name, "0")  # so that it is put back
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        here = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(PenstockError, match=says.replace("HERE", here)),
            ray_cluster(address.replace("HERE", here)),
        ):
            pass


def test_other_versions_are_told_from_no_answer() -> None:
    told = RuntimeError(
        "Version mismatch: The cluster was started with:\n  Ray: 2.1\n  Python: 3.9"
    )
    assert "runs another Ray or Python than this process" in str(room._not_joined("h:1", told))
    assert isinstance(room._not_joined("h:1", told), UsageError)
    assert isinstance(room._not_joined("h:1", ConnectionError("nothing")), CapacityError)


def test_gpus_of_one_model_are_of_one_machine() -> None:
    cluster = RayCluster((RayNode("a", 8, 4), RayNode("b", 8, 3)), own=False)
    cluster.check_gpus(2, 3, "worker")
    cluster.check_gpus(0, 99, "worker")
    with pytest.raises(
        CapacityError, match=r"4 workers of 2 GPUs, .* ask for 8, .* has 7 \(4 at a, 3 at b\)"
    ):
        cluster.check_gpus(2, 4, "worker")
