"""What this machine is, and the checksums of a folder, for the manifest. It knows files and libraries."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from penstock.artifact.checksums import sum_files
from penstock.artifact.manifest import MANIFEST, STATE, BuiltOn, FileSums
from penstock.bench.machine_probe import this_machine
from penstock.disk import why_not_written


def built_on(device: torch.device) -> BuiltOn:
    """Returns what this machine is."""
    machine = this_machine()
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return BuiltOn(
        device="cpu" if properties is None else properties.name,
        capability=None if properties is None else (properties.major, properties.minor),
        memory_bytes=machine.memory_mib << 20 if properties is None else properties.total_memory,
        processor=machine.cpu,
        driver=machine.gpu.driver if machine.gpu is not None else None,
        torch=str(torch.__version__),
        triton=_version("triton") if cuda else None,
        cuda=torch.version.cuda if cuda else None,
    )


def sum_folder(folder: Path) -> dict[str, FileSums]:
    """Brings all files of the folder to the disk and returns their checksums. Raises JournalError, CapacityError."""
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] not in (MANIFEST, STATE)
    )
    for name in names:
        try:
            handle = os.open(folder / name, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise why_not_written(error, folder / name) from error
    return sum_files(folder, names)


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
