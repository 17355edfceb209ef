"""Reads how many drafted tokens an engine accepts a step, from two counters of its /metrics. The
peer's file names the counters. Knows Prometheus' text form; no engine.
"""

from __future__ import annotations

import http.client
import math
from collections.abc import Sequence

from penstock.bench.server_process import ServerProcess

PATH = "/metrics"


def read_counters(server: ServerProcess | None, names: Sequence[str]) -> list[float] | None:
    """Returns the counters' sums over their labels. None: no counters are named, the server is
    somebody else's, it has none of them (it drafts nothing), or its /metrics cannot be read: a load
    level counts without them, and the next one finds a dead server."""
    if server is None or not names:
        return None
    found: dict[str, float] = {}
    try:
        for line in server.get(PATH).splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            if name in names:
                found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    except (OSError, http.client.HTTPException, ValueError):
        return None
    whole = len(found) == len(names) and all(map(math.isfinite, found.values()))
    return [found[name] for name in names] if whole else None


def accepted(before: list[float] | None, after: list[float] | None) -> float | None:
    """Returns accepted draft tokens a step between two readings of [accepted, steps]; None: nothing
    was drafted."""
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])
