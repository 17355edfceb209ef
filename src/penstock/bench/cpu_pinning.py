"""Which of this machine's cores the measured server has, and which the client: each its own (on two
cores without this every client was short of CPU); what they are called, and the memory beside them.
It knows sets of cores; not who runs on them.
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
    """Returns the model's name, or what the platform calls the kind."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.exists() else None
    return (found[1] if found else platform.processor() or platform.machine() or "unknown").strip()


def memory_bytes() -> int:
    """Returns this machine's memory; 0 where the system cannot say."""
    info = Path("/proc/meminfo")
    found = re.search(r"^MemTotal:\s*(\d+) kB", info.read_text(), re.M) if info.exists() else None
    return int(found[1]) << 10 if found else 0


def cores_here() -> list[int]:
    """Returns what this process may run on, ascending. Where the system cannot say or pin (macOS):
    none."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def count_here() -> int:
    """Returns how many those are; where the system cannot say, how many the machine has."""
    return len(cores_here()) or os.cpu_count() or 1


def count_all() -> int:
    """Returns how many a server on this machine has that somebody else started: whatever the first
    process of the machine, or of the container, may run on; where the system cannot say, how many
    there are. This process may have been given fewer (`taskset`)."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    try:
        return max(len(os.sched_getaffinity(1)), count_here())
    except OSError:  # hidden from us
        return os.cpu_count() or count_here()


def server_share(cores: list[int], processes: int, asked: int | None) -> list[int]:
    """Returns the server's cores: `asked` of them, or all but one a client process; the first ones.
    Empty: none is pinned, for there is one core or no pinning. Raises UsageError where the client
    would have none."""
    if asked is not None and not 0 < asked < len(cores):
        have = f"this machine has {len(cores)}" if cores else "this system pins none"
        raise UsageError(
            f"--server-cores {asked}: {have}, and the client needs one too", param="server_cores"
        )
    return cores[: asked or max(1, len(cores) - processes)] if len(cores) > 1 else []


def clients_at_once(cores: list[int], server: list[int], processes: int) -> int:
    """Returns how many of the client processes have a core of their own: what their ceiling is that
    of."""
    return min(processes, len(cores) - len(server)) if server else processes


@contextmanager
def away_from(server: list[int]) -> Iterator[None]:
    """This thread, and whatever it starts, on the other cores. server: empty changes nothing."""
    before = cores_here()
    if server:
        os.sched_setaffinity(0, set(before) - set(server))
    try:
        yield
    finally:
        if server:
            os.sched_setaffinity(0, before)
