"""What this machine is, for a record: GPU and its driver and clocks, processor, memory, system. It asks nvidia-smi and
/proc; where they are silent it says so."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from penstock.almanac.record import Gpu, Machine

QUERY = "name,memory.total,driver_version,clocks.sm,clocks.mem,clocks.max.sm"
UNKNOWN = "unknown"


def this_machine() -> Machine:
    return Machine(
        gpu=_gpu(),
        cpu=_cpu(),
        cores=os.cpu_count() or 1,
        memory_mib=_memory_mib(),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )


def _gpu() -> Gpu | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.strip().splitlines()]
    if done.returncode or not rows or len(rows[0]) != 6:
        return None
    name, memory, driver, sm, mem, most = rows[0]
    clocks = f"SM {sm} MHz of {most}, memory {mem} MHz, before the run"
    return Gpu(name=name, count=len(rows), memory_mib=int(float(memory)), driver=driver, clocks=clocks)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.exists() else None
    return (found[1] if found else platform.processor() or UNKNOWN).strip()


def _memory_mib() -> int:
    info = Path("/proc/meminfo")
    found = re.search(r"^MemTotal:\s*(\d+) kB", info.read_text(), re.M) if info.exists() else None
    return int(found[1]) // 1024 if found else 0
