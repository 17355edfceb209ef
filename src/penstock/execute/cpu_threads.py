"""settle_threads: sets torch's thread count on a CPU. It is one thread per core that other
processes leave free.

By default torch takes one thread per core, and a matrix product ends only when all threads have
run. Beside two busy processes on two cores the demo model made 35 tok/s with two threads and 300
with one. `OMP_NUM_THREADS`, if set, decides alone. The number is fixed before the model is loaded,
since the last bits of a row's logits may depend on it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

# described in proc_stat(5) and in cgroup v2's cpu controller
STAT, QUOTA = (
    Path("/proc/stat"),
    Path("/sys/fs/cgroup/cpu.max"),
)
# seconds of a measuring window, and most windows: enough that a process that starts and runs
# briefly doesn't count
WINDOW, WINDOWS = (
    0.05,
    20,
)
IDLE = (3, 4)  # fields of a core's times in /proc/stat: idle, and waiting for a disk

Times = dict[int, tuple[int, int]]  # core number -> its idle clock ticks, and all its clock ticks


def settle_threads(device: torch.device) -> None:
    """Lowers the number of torch's threads if other processes or a CPU quota leave fewer cores, and
    prints a line about it. Call it in the thread that computes."""
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
    """Returns how many of these cores were idle in the best of up to WINDOWS windows; stops once
    `enough` were. If the system counts no ticks, all count as idle."""
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
    """Returns the times of `cores` from the text of /proc/stat."""
    found: Times = {}
    for line in stat.splitlines():
        name, *numbers = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
            # fields after the eighth (guest times) are included in the first two already
            ticks = [int(number) for number in numbers[:8]]
            found[int(name[3:])] = sum(ticks[at] for at in IDLE), sum(ticks)
    return found


def quota_of(path: Path) -> float:
    """Returns the number of cores this cgroup may use; infinity without a limit."""
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):  # no cgroup v2, or its root, which has no such file
        return float("inf")
    return float("inf") if quota == "max" else int(quota) / int(period)
