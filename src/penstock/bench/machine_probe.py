"""Describes this machine for a record: GPU with driver and clocks, processor, memory, system. Reads
nvidia-smi and /proc, and says so where they give nothing. For a server on another machine, the user
gives a file that describes it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from penstock.almanac.parse_record import faults_in_a_line
from penstock.almanac.record import Gpu, MachineInfo
from penstock.bench.cpu_pinning import count_all, count_here, memory_bytes, processor
from penstock.bench.endpoint import target_of
from penstock.errors import EngineError, UsageError

QUERY = "name,memory.total,driver_version,clocks.sm,clocks.mem,clocks.max.sm"
UUID = re.compile(r"GPU-[0-9a-f-]{36}")
SYSTEM_ID = Path("/etc/machine-id")
SYSTEM_NAME = re.compile("[0-9a-f]{32}")  # else a word, as "uninitialized" in machines' images
PATIENCE = 60  # seconds to wait for nvidia-smi
HANGS = f"nvidia-smi has not answered within {PATIENCE} s: the GPU's driver hangs"
HERE = ("127.0.0.1", "localhost", "::1")
EXAMPLE = (  # an example of a machine's file; without a GPU "gpu" is null
    '{"gpu": {"name": "NVIDIA H200", "count": 1, "memory_mib": 143771, "driver": "580.159.04"},'
    ' "cpu": "AMD EPYC", "cores": 16, "memory_mib": 1031000, "system": "Linux 6.8", "python":'
    ' "3.12.3"}'
)


def machine_of(
    file: Path | None,
    url: str | None,
    environment: Mapping[str, str] = os.environ,
    *,
    started: bool,
) -> MachineInfo:
    """Returns the description of the server's machine: from `file`, or of this machine, as a server
    with these environment variables sees it. started: True if the bench starts the server, with its
    own cores and variables; else the server may use all the machine's cores, and its variables are
    unknown. Raises UsageError for an invalid file, and when a file is needed.
    """
    if file is not None:
        try:
            return MachineInfo.model_validate_json(file.read_bytes())
        except (OSError, ValidationError) as error:
            why = faults_in_a_line(error) if isinstance(error, ValidationError) else error.strerror
            raise UsageError(f"{file} describes no machine: {why}", param="machine") from error
    if url is not None and (host := target_of(url).host) not in HERE:
        raise UsageError(
            f"the server is on {host}: describe that machine with --machine FILE.json, as"
            f" {EXAMPLE}",
            param="machine",
        )
    machine = this_machine(environment, started=started)
    if not started and machine.gpu is not None and machine.gpu.count > 1:
        raise UsageError(
            f"this machine has {machine.gpu.count} GPUs, and nobody here knows which of them the"
            f" server has: describe its machine with --machine FILE.json, as {EXAMPLE}",
            param="machine",
        )
    return machine


def this_machine(
    environment: Mapping[str, str] = os.environ, *, started: bool = True
) -> MachineInfo:
    return MachineInfo(
        gpu=_gpu(environment.get("CUDA_VISIBLE_DEVICES") if started else None),
        cpu=processor(),
        cores=count_here() if started else count_all(),
        memory_mib=memory_bytes() >> 20,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        identity=identity(),
    )


def identity() -> str | None:
    """Returns a name that no other machine has: a checksum of its GPUs' ids, or else of its
    system's. None where it has neither."""
    if shutil.which("nvidia-smi") is not None:
        command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired as error:
            raise EngineError(HANGS) from error
        if found := sorted(set(UUID.findall(done.stdout))):
            return f"gpu-{_digest(' '.join(found))}"
    told = SYSTEM_ID.read_text().strip() if SYSTEM_ID.is_file() else ""
    return f"host-{_digest(told)}" if SYSTEM_NAME.fullmatch(told) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _gpu(visible: str | None) -> Gpu | None:
    """Describes the GPUs that the server may see, as nvidia-smi lists them. visible:
    CUDA_VISIBLE_DEVICES; None: all. Raises EngineError when the driver does not answer, because the
    measured hardware would be unknown.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise EngineError(HANGS) from error
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.strip().splitlines()]
    if done.returncode or not rows or len(rows[0]) != 6:
        return None
    name, memory, driver, sm, mem, most = rows[0]
    count = (
        len(rows)
        if visible is None
        else len([each for each in visible.split(",") if each.strip() not in ("", "-1")])
    )
    if not count:
        return None
    clocks = f"SM {sm} MHz of {most}, memory {mem} MHz, before the run"
    return Gpu(name=name, count=count, memory_mib=_mib(memory), driver=driver, clocks=clocks)


def _mib(text: str) -> int:
    """Parses nvidia-smi's memory size. Returns MiB; 0 where the driver gives none, as for memory
    shared with the CPU."""
    return int(float(text)) if re.fullmatch(r"\d+(\.\d+)?", text) else 0
