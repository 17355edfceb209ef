"""Where replicas run: GPUs and cores of a made-up machine, and each thing that cannot be as one
line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CapacityError, PenstockError, UsageError
from penstock.replicas.placement import GpuFacts, HostFacts, Place, places, read_gpus

A100 = GpuFacts("x", "A100", 0.0, 81_000.0)
USED = GpuFacts("x", "H200", 40_000.0, 143_000.0)


def host(count: int = 4, visible: str | None = None, **change: Any) -> HostFacts:
    gpus = [
        GpuFacts(
            f"GPU-{n}{n}",
            "H200",
            500.0,
            143_000.0,
            frozenset(range(4 * (n // 2), 4 * (n // 2) + 4)),
        )
        for n in range(count)
    ]
    for number, gpu in change.pop("other", {}).items():
        gpus[number] = gpu
    return HostFacts(gpus, visible, range(8), **change)


def put(count: int, made: HostFacts, each: int = 1, device: str = "auto") -> list[Place]:
    return places(count, each, device, 0.92, made)


def test_each_has_its_gpus_and_the_cores_of_their_node() -> None:
    assert put(2, host()) == [Place("0", [0, 1, 2, 3]), Place("1", [0, 1, 2, 3])]
    assert put(2, host(), each=2) == [Place("0,1", [0, 1, 2, 3]), Place("2,3", [4, 5, 6, 7])]
    assert put(2, host(visible="3,0")) == [Place("3", [4, 5, 6, 7]), Place("0", [0, 1, 2, 3])]
    assert put(2, host(visible="GPU-33,GPU-0")) == [
        Place("GPU-33", [4, 5, 6, 7]),
        Place("GPU-0", [0, 1, 2, 3]),
    ]
    assert put(1, host()) == [Place()]  # one replica sees what its service does


def test_an_unknown_node_pins_nothing_and_cores_we_may_not_use_are_left() -> None:
    unknown = GpuFacts("GPU-x", "H200", 500.0, 143_000.0)
    assert put(2, host(other={1: unknown}))[1] == Place("1")
    made = HostFacts(host().gpus, None, [2, 3])
    assert put(2, made)[0].cores == [2, 3]


def test_without_gpus_the_cores_are_shared_out() -> None:
    none = HostFacts((), None, range(8))
    assert put(3, none) == [Place(None, [0, 1]), Place(None, [2, 3]), Place(None, [4, 5])]
    assert put(2, host(), device="cpu") == [Place(None, [0, 1, 2, 3]), Place(None, [4, 5, 6, 7])]
    # all are hidden
    assert put(2, host(visible="")) == [
        Place(None, [0, 1, 2, 3]),
        Place(None, [4, 5, 6, 7]),
    ]
    assert put(3, HostFacts((), None, range(2))) == [Place()] * 3


@pytest.mark.parametrize(
    ("count", "made", "how", "kind", "said"),
    [
        (
            8,
            host(),
            {},
            UsageError,
            "8 replicas need 8 GPUs, and there are 4: give --data-parallel-size 4",
        ),
        (
            3,
            host(),
            {"each": 2},
            UsageError,
            "of 2 GPUs each need 6 GPUs, and there are 4: give --data",
        ),
        (3, host(visible="1,2"), {}, UsageError, "CUDA_VISIBLE_DEVICES shows 2 and hides 2: give"),
        (
            2,
            HostFacts((), None, range(8)),
            {"device": "cuda"},
            UsageError,
            "there are 0: take GPUs, or --device cpu",
        ),
        (2, host(visible="1,7"), {}, UsageError, "names GPU 7, and there are 0 to 3"),
        (2, host(visible="1,1"), {}, UsageError, "names GPU 1 twice"),
        (
            2,
            host(other={1: A100}),
            {},
            UsageError,
            "GPU 0 (H200, 140 GiB) and GPU 1 (A100, 79 GiB) are unequal",
        ),
        (
            2,
            host(other={1: USED}),
            {},
            CapacityError,
            "GPU 1 has 39 of its 140 GiB in use by another process",
        ),
    ],
)
def test_what_cannot_be_is_one_line_with_the_way_out(
    count: int, made: HostFacts, how: dict[str, Any], kind: type[PenstockError], said: str
) -> None:
    with pytest.raises(kind) as caught:
        put(count, made, **how)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.param == "data_parallel_size"


def test_what_is_beyond_the_replicas_is_nobodys_matter() -> None:
    other = GpuFacts("x", "A100", 60_000.0, 81_000.0)
    assert [place.visible for place in put(2, host(other={3: other}))] == ["0", "1"]


def test_the_drivers_words_and_the_kernels(tmp_path: Path) -> None:
    for bus, node in (("0000:3b:00.0", "1"), ("0000:86:00.0", "-1")):
        (tmp_path / "pci" / bus).mkdir(parents=True)
        (tmp_path / "pci" / bus / "numa_node").write_text(f"{node}\n")
    (tmp_path / "node" / "node1").mkdir(parents=True)
    (tmp_path / "node" / "node1" / "cpulist").write_text("4-6,12\n")
    said = (
        "GPU-a, NVIDIA H200, 00000000:3B:00.0, 512, 143771\nGPU-b, NVIDIA H200, 00000000:86:00.0,"
        " [N/A], 143771\n"
    )
    one, two = read_gpus(said + "an unusual line\n", tmp_path / "pci", tmp_path / "node")
    assert one == GpuFacts("GPU-a", "NVIDIA H200", 512.0, 143_771.0, frozenset((4, 5, 6, 12)))
    assert two == GpuFacts("GPU-b", "NVIDIA H200", 0.0, 143_771.0, frozenset())
