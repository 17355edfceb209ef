"""Divides CPU cores between server and client. (On two cores without this, every client was short
of CPU.) Also names the processor and counts the memory. Knows sets of cores; not the processes on
them.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import UsageError


def processor() -> str:
    """Returns the processor's model name, or the platform's name for its kind."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.exists() else None
    return (found[1] if found else platform.processor() or platform.machine() or "unknown").strip()


def memory_bytes() -> int:
    """Returns this machine's memory in bytes; 0 where the system does not say."""
    info = Path("/proc/meminfo")
    found = re.search(r"^MemTotal:\s*(\d+) kB", info.read_text(), re.M) if info.exists() else None
    return int(found[1]) << 10 if found else 0


def cores_here() -> list[int]:
    """Returns the cores this process may run on, ascending; empty where the system cannot pin
    (macOS)."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def count_here() -> int:
    """Returns the number of cores this process may run on, else the machine's number of cores."""
    return len(cores_here()) or os.cpu_count() or 1


def count_all() -> int:
    """Returns the number of cores that a server started by somebody else may use: the cores of the
    first process of the machine or container. This process may have fewer (`taskset`). Where the
    system does not say, the machine's number of cores.
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    try:
        return max(len(os.sched_getaffinity(1)), count_here())
    except OSError:  # process 1 is hidden from us
        return os.cpu_count() or count_here()


def server_share(cores: list[int], processes: int, asked: int | None) -> list[int]:
    """Returns the server's cores: the first `asked` ones, or by default all but one for each client
    process. Empty: nothing is pinned, because there is only one core or the system cannot pin.
    Raises UsageError when the client would have no core.
    """
    if asked is not None and not 0 < asked < len(cores):
        have = f"this machine has {len(cores)}" if cores else "this system pins none"
        raise UsageError(
            f"--server-cores {asked}: {have}, and the client needs one too", param="server_cores"
        )
    return cores[: asked or max(1, len(cores) - processes)] if len(cores) > 1 else []


def clients_at_once(cores: list[int], server: list[int], processes: int) -> int:
    """Returns how many client processes have a core of their own; the calibrated limits of this
    number apply."""
    return min(processes, len(cores) - len(server)) if server else processes


@contextmanager
def away_from(server: list[int]) -> Iterator[None]:
    """Runs this thread, and the processes it starts, on the other cores. An empty `server` changes
    nothing."""
    before = cores_here()
    if server:
        os.sched_setaffinity(0, set(before) - set(server))
    try:
        yield
    finally:
        if server:
            os.sched_setaffinity(0, before)
