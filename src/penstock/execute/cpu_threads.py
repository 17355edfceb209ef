"""How many threads an engine on the CPU computes with: one a core that other work leaves free.

torch takes a thread a core, and a product ends when the last of them has run: beside two busy
processes on two cores the demo model made 35 tok/s by two threads and 300 by one. `OMP_NUM_THREADS`
decides alone where it is set. The number is settled before the model is loaded, and stays: a row's
bits may hang on it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

# proc_stat(5), cgroup v2's cpu controller
STAT, QUOTA = (
    Path("/proc/stat"),
    Path("/sys/fs/cgroup/cpu.max"),
)
# seconds that are looked at, and how often where cores are busy: a start nearby is short
WINDOW, WINDOWS = (
    0.05,
    20,
)
IDLE = (3, 4)  # of a core's times in /proc/stat: idle, and waiting for a disk

Times = dict[int, tuple[int, int]]  # of a core: clock ticks in which it was idle, and all


def settle_threads(device: torch.device) -> None:
    """Takes fewer of torch's threads where other work or a quota leaves fewer cores, and says so.
    Call it in the thread that computes."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1 or "OMP_NUM_THREADS" in os.environ or not STAT.exists():
        return
    cores = sorted(os.sched_getaffinity(0))
    free, quota = free_cores(cores, threads), quota_of(QUOTA)
    most = min(threads, max(1, int(min(free, quota) + 0.5)))
    if most < threads:
        why = f"a quota leaves {quota:g}" if quota <= free else f"other work leaves {free:.1f}"
        print(
            f"penstock: of {len(cores)} cores {why}: {most} of {threads} threads compute"
            " (OMP_NUM_THREADS overrides)",
            file=sys.stderr,
            flush=True,
        )
        torch.set_num_threads(most)


def free_cores(
    cores: Iterable[int],
    enough: float,
    look: Callable[[], str] = STAT.read_text,
    wait: Callable[[float], None] = time.sleep,
) -> float:
    """Returns how many of these cores were idle in the best of some windows; the first in which
    `enough` were ends the look. Where the system counts nothing all are."""
    cores, best = set(cores), 0.0
    before = times_of(look(), cores)
    for _ in range(WINDOWS):
        wait(WINDOW)
        after = times_of(look(), cores)
        spans = [
            (after[core][0] - before[core][0], after[core][1] - before[core][1])
            for core in after.keys() & before
        ]
        if not any(whole for _, whole in spans):
            return float(len(cores))
        best, before = max(best, sum(idle / whole for idle, whole in spans if whole)), after
        if best >= enough - 0.5:
            break
    return best


def times_of(stat: str, cores: set[int]) -> Times:
    """Reads /proc/stat."""
    found: Times = {}
    for line in stat.splitlines():
        name, *numbers = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
            ticks = [int(number) for number in numbers[:8]]  # guests' are in the first two already
            found[int(name[3:])] = sum(ticks[at] for at in IDLE), sum(ticks)
    return found


def quota_of(path: Path) -> float:
    """Returns how many cores' time this cgroup may take; infinity where nothing bounds it."""
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):  # no cgroup v2, or its root, which has no such file
        return float("inf")
    return float("inf") if quota == "max" else int(quota) / int(period)
