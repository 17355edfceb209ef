"""built_on: this machine and its libraries, as an artifact's manifest tells of the ones that it was built with. It asks
torch and /proc, loads no model, and imports no triton."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from penstock.artifact.manifest import BuiltOn
from penstock.bench.cpu_pinning import processor

_DRIVER = Path("/proc/driver/nvidia/version")


def built_on(device: torch.device) -> BuiltOn:
    """Returns what choices made here, for this device, would be said to hold for."""
    libraries = {"torch": torch.__version__, "triton": _version("triton"), "cuda": torch.version.cuda}
    if device.type == "cpu":
        memory = Path("/proc/meminfo")
        total = re.search(r"^MemTotal:\s*(\d+) kB", memory.read_text(), re.M) if memory.exists() else None
        return BuiltOn(
            device="cpu", memory_bytes=int(total[1]) << 10 if total else 0, processor=processor(), **libraries
        )
    properties = torch.cuda.get_device_properties(device)
    return BuiltOn(
        device=properties.name,
        capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        processor=processor(),
        driver=_driver(),
        **libraries,
    )


def _driver() -> str | None:
    """The GPU driver's version; None where the system hides it."""
    if not _DRIVER.exists():
        return None
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", _DRIVER.read_text())
    return found[1] if found else None


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
