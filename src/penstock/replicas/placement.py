"""placement: assigns GPUs and CPU cores to replicas. An impossible placement raises a one-line
error.

Replicas take the GPUs of CUDA_VISIBLE_DEVICES, or all GPUs, in order; a replica's cores are those
of its GPUs' NUMA nodes, if known. Replicas without GPUs divide the cores. Knows `HostFacts`, which
tests make up; no engines.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.launch import Place
from penstock.errors import CapacityError, UsageError

_ASKED = "uuid,name,pci.bus_id,memory.used,memory.total"
_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")
_PARAM = "data_parallel_size"


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU as its driver describes it; "" and 0 where unknown. cores: CPU cores of its NUMA node;
    empty: unknown."""

    uuid: str = ""
    name: str = ""
    used: float = 0.0  # MiB of the GPU's memory in use
    total: float = 0.0
    cores: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class HostFacts:
    """GPUs and cores of a machine. visible: CUDA_VISIBLE_DEVICES, None if not set; cores: the cores
    this process may use."""

    gpus: Sequence[GpuFacts] = ()
    visible: str | None = None
    cores: Sequence[int] = ()

    @classmethod
    def found(cls) -> HostFacts:
        """Returns this machine's facts. Without nvidia-smi, GPUs are only counted by /dev/nvidia*,
        without names."""
        gpus = _ask_driver() or [
            GpuFacts() for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()
        ]
        return cls(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), sorted(os.sched_getaffinity(0)))

    @property
    def seen(self) -> list[tuple[str, GpuFacts]]:
        """Returns the GPUs that CUDA shows this process, as (its name in CUDA_VISIBLE_DEVICES,
        facts). Raises UsageError for a GPU that does not exist or is named twice."""
        if self.visible is None:
            return [(str(number), gpu) for number, gpu in enumerate(self.gpus)]
        found: list[tuple[str, GpuFacts]] = []
        for name in filter(None, map(str.strip, self.visible.split(","))):
            if name == "-1":  # CUDA itself ignores the rest of the list
                break
            if name.isdigit() and int(name) >= len(self.gpus) > 0:
                there = f"0 to {len(self.gpus) - 1}"
                raise UsageError(
                    f"CUDA_VISIBLE_DEVICES names GPU {name}, and there are {there}: name those",
                    param=_PARAM,
                )
            if name in (known for known, _ in found):
                raise UsageError(
                    f"CUDA_VISIBLE_DEVICES names GPU {name} twice: name each once", param=_PARAM
                )
            of_uuid = next(
                (gpu for gpu in self.gpus if gpu.uuid and gpu.uuid.startswith(name)), GpuFacts()
            )
            found.append((name, self.gpus[int(name)] if name.isdigit() and self.gpus else of_uuid))
        return found


def places(
    count: int, gpus_each: int, device: str, utilization: float, host: HostFacts
) -> list[Place]:
    """Returns a Place (GPUs and CPU cores) for each of `count` replicas of `gpus_each` GPUs.
    device, utilization: the options `device` and `gpu_memory_utilization`. Raises UsageError or
    CapacityError."""
    if count == 1:
        return [Place()]
    seen = [] if device == "cpu" else host.seen
    if device == "cuda" or seen:
        return _on_gpus(count, gpus_each, utilization, seen, host)
    each = len(host.cores) // count
    return [Place(None, list(host.cores[each * at : each * (at + 1)])) for at in range(count)]


def _on_gpus(
    count: int, each: int, utilization: float, seen: list[tuple[str, GpuFacts]], host: HostFacts
) -> list[Place]:
    need, there = count * each, len(seen)
    if need > there:
        hidden = len(host.gpus) - there
        which = (
            f"there are {there}"
            if hidden <= 0
            else f"CUDA_VISIBLE_DEVICES shows {there} and hides {hidden}"
        )
        way_out = (
            f"give --data-parallel-size {there // each}"
            if there >= each
            else "take GPUs, or --device cpu"
        )
        of_each = f" of {each} GPUs each" if each > 1 else ""
        more = " or name more GPUs there" if hidden > 0 else ""
        raise UsageError(
            f"{count} replicas{of_each} need {need} GPUs, and {which}: {way_out}{more}",
            param=_PARAM,
        )
    used = seen[:need]
    (first, model), *others = used
    for name, gpu in others:
        if (gpu.name, gpu.total) != (model.name, model.total):
            what = f"GPU {first} ({_told(model)}) and GPU {name} ({_told(gpu)}) are unequal"
            way_out = "name equal ones in CUDA_VISIBLE_DEVICES, or start a server on each"
            raise UsageError(f"{what}, and replicas are of one kind: {way_out}", param=_PARAM)
    for name, gpu in used:
        if gpu.used > (1 - utilization) * gpu.total:
            what = (
                f"GPU {name} has {gpu.used / 1024:.0f} of its {gpu.total / 1024:.0f} GiB in use by"
                " another process"
            )
            way_out = (
                "end that, name other GPUs in CUDA_VISIBLE_DEVICES, or lower"
                " --gpu-memory-utilization"
            )
            raise CapacityError(f"{what}: {way_out}", param=_PARAM)
    parts = [used[each * at : each * (at + 1)] for at in range(count)]
    return [Place(",".join(name for name, _ in part), _cores_of(part, host)) for part in parts]


def _told(gpu: GpuFacts) -> str:
    return f"{gpu.name}, {gpu.total / 1024:.0f} GiB"


def _cores_of(part: Sequence[tuple[str, GpuFacts]], host: HostFacts) -> list[int]:
    """Returns the usable cores of the NUMA nodes of these GPUs; none if a node is unknown."""
    if not all(gpu.cores for _, gpu in part):
        return []
    return sorted(frozenset[int]().union(*(gpu.cores for _, gpu in part)) & frozenset(host.cores))


def _ask_driver() -> list[GpuFacts]:
    """Returns the GPUs in PCI bus order, from nvidia-smi; none if it is missing or fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    asked = [command, f"--query-gpu={_ASKED}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []  # a driver that fails: the engines will report it, in CUDA's words
    return read_gpus(said)


def read_gpus(said: str, pci: Path = _PCI, nodes: Path = _NODES) -> list[GpuFacts]:
    """Returns the GPUs in nvidia-smi's output `said`; pci, nodes: the kernel's folders of PCI
    devices and NUMA nodes."""
    rows = [row for row in csv.reader(said.splitlines(), skipinitialspace=True) if len(row) == 5]
    return [
        GpuFacts(uuid, name, _number(used), _number(total), _cores_at(bus, pci, nodes))
        for uuid, name, bus, used, total in rows
    ]


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0


def _cores_at(bus: str, pci: Path, nodes: Path) -> frozenset[int]:
    """Returns the cores of the NUMA node of a PCI device; none if unknown."""
    domain, _, rest = bus.lower().partition(":")
    try:
        node = int((pci / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
        listed = (nodes / f"node{node}" / "cpulist").read_text() if node >= 0 else ""
    except (OSError, ValueError):
        return frozenset()
    spans = [span.partition("-") for span in listed.strip().split(",") if span]
    return frozenset(
        core for low, _, high in spans for core in range(int(low), int(high or low) + 1)
    )
