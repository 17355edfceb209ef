"""built_on: describes this machine and its libraries. A built engine's manifest stores the
description. Reads torch and /proc; loads no model and imports no triton."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from penstock.artifact.manifest import BuiltOn
from penstock.bench.cpu_pinning import memory_bytes, processor

_DRIVER = Path("/proc/driver/nvidia/version")


def built_on(device: torch.device) -> BuiltOn:
    """Returns the description of this machine and device. Options that `penstock build` tunes here
    are valid for machines of the same description."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return BuiltOn(
        device="cpu" if gpu is None else gpu.name,
        capability=None if gpu is None else (gpu.major, gpu.minor),
        memory_bytes=memory_bytes() if gpu is None else gpu.total_memory,
        processor=processor(),
        driver=None if gpu is None else _driver(),
        torch=str(torch.__version__),
        triton=None if gpu is None else _version("triton"),
        cuda=None if gpu is None else torch.version.cuda,
    )


def _driver() -> str | None:
    """Returns the GPU driver's version, or None if the system hides it."""
    if not _DRIVER.exists():
        return None
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", _DRIVER.read_text())
    return found[1] if found else None


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
