"""Resource limits and memory of this process. Reads them from the kernel (setrlimit, /proc). Knows
only its own process."""

from __future__ import annotations

import os
import resource
import sys


def bound(which: int, most: int) -> None:
    """Sets the soft limit of the resource `which` (resource.RLIMIT_*) to `most`, or to the hard
    limit if that is lower."""
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


class ProcessMemory:
    """Reads how much memory this process has. /proc/self/statm stays open, since opening it for
    each job would take longer than rendering a chat."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY) if sys.platform == "linux" else None

    def read(self) -> tuple[int, int]:
        """Returns the bytes of address space and of resident memory; (0, 0) where there is no
        /proc."""
        if self._file is None:
            return 0, 0
        addresses, resident = os.pread(self._file, 128, 0).split()[:2]
        return int(addresses) * resource.getpagesize(), int(resident) * resource.getpagesize()
