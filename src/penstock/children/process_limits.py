"""What a process may take, and what it has, by the kernel: resource limits and /proc. It knows one
process: its own."""

from __future__ import annotations

import os
import resource
import sys


def bound(which: int, most: int) -> None:
    """Sets the soft limit, which is what counts; no higher than the hard one that we were started
    with."""
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


class ProcessMemory:
    """What the process has. To open the system's file for each job would take longer than to render
    a chat's frame."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY) if sys.platform == "linux" else None

    def read(self) -> tuple[int, int]:
        """Returns bytes of addresses and of memory; (0, 0) where the system doesn't say."""
        if self._file is None:
            return 0, 0
        addresses, resident = os.pread(self._file, 128, 0).split()[:2]
        return int(addresses) * resource.getpagesize(), int(resident) * resource.getpagesize()
