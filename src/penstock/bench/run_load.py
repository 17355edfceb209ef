"""A load: planned requests shared out to k client processes, and what came of them as samples, in order. It knows
shares and columns; not what a request asks (workload.py) nor which points a run has (point_planner.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.almanac.record import BUSY, HEADROOM, LAG, LATE, LATE_SHARE, ClientHealth
from penstock.almanac.samples import Samples, from_lists
from penstock.bench.endpoint import Endpoint
from penstock.bench.worker_pool import WorkerPool
from penstock.bench.worker_protocol import COLUMNS, PlannedRequest, WorkerProgress, WorkerResult, WorkerSpec
from penstock.errors import UsageError

OPENED = 256  # connections of an open loop that are opened beforehand, at most, unless all start at once


@dataclass(frozen=True)
class Load:
    """closed: slots in flight; None: an open loop, each ask at its time. stop_after, stall: seconds; what hasn't ended
    by then is unfinished, what hears no byte for so long is stalled. window: asks that are intended in it count; once
    it is over and they have ended, the rest is cut."""

    asks: list[PlannedRequest]
    closed: int | None
    stop_after: float
    stall: float
    window: tuple[float, float]

    def __post_init__(self) -> None:
        if not self.asks:
            raise UsageError("a load has no asks: give at least one")
        if self.closed is not None and self.closed < 1:
            raise UsageError(f"a closed loop has {self.closed} slots: it takes 1 or more", param="closed")
        if self.closed is None and not all(0 <= ask.intended < math.inf for ask in self.asks):
            raise UsageError("an ask of an open loop has no intended time: give seconds from 0 on", param="asks")
        if not (self.stop_after > 0 and self.stall > 0):
            raise UsageError("stop_after and stall are seconds above 0", param="stop_after")
        if not self.window[0] < self.window[1]:
            raise UsageError(f"the window {self.window} is empty: its first second lies before its end", param="window")


class LoadProgress(WorkerProgress):
    """What all processes have done together, at `seconds` since the point's begin. firsts: of those that ended since
    the last progress. asked: requests of the whole load."""

    seconds: float
    asked: int


@dataclass(frozen=True)
class ClientReport:
    """What the clients say of themselves and of the point. busy: CPU share of the busiest process. late_limit: what
    late_p99 may be here. troubles: outcome -> one of its messages. again: requests that were sent twice, for the server
    had closed the idle connection. cpu: seconds of all processes."""

    lag_p99: float
    busy: float
    late_p99: float
    late_limit: float
    events_per_second: float
    requests_per_second: float
    processes: int
    cpu: float
    seconds: float
    again: int
    begin: float
    troubles: dict[str, str] = field(default_factory=dict)

    def look(self, ceiling_events: float | None, ceiling_requests: float | None) -> ClientHealth:
        """Returns what a record keeps of it, with the headroom that a calibrated ceiling gives: the smaller of events'
        and requests'."""
        asked = ((ceiling_events, self.events_per_second), (ceiling_requests, self.requests_per_second))
        rooms = [ceiling / rate for ceiling, rate in asked if ceiling is not None and rate > 0]
        headroom = min(1e9, *rooms) if rooms else None
        cramped = self.busy > BUSY if headroom is None else headroom < HEADROOM
        short = cramped or self.lag_p99 > LAG or self.late_p99 > self.late_limit
        busy, late = min(1.0, self.busy), self.late_p99
        return ClientHealth(lag_p99=self.lag_p99, busy=busy, headroom=headroom, late_p99=late, short=short)


def run_load(
    target: Endpoint,
    load: Load,
    *,
    point: str,
    start: int,
    processes: int,
    progress: Callable[[LoadProgress], bool | None] | None = None,
    pool: WorkerPool | None = None,
) -> tuple[Samples, ClientReport]:
    """Sends the load's asks and hears the answers. A request that fails is a line of the samples, whatever the reason;
    one that was never due has none. progress: told a few times a second; when it says True, the point ends there and
    what goes on is unfinished. pool: client processes that other loads have too. Raises EngineError when a client
    process of ours ends by itself."""

    def hear(seconds: float, news: list[WorkerProgress], firsts: list[float]) -> bool | None:
        return progress(together(len(load.asks), seconds, news, firsts)) if progress is not None else None

    with nullcontext(pool) if pool is not None else WorkerPool() as clients:
        parts = clients.run(shares(target, load, processes), hear)
    return gather(load, parts, point, start), see(load, parts, clients.begin)


def shares(target: Endpoint, load: Load, processes: int) -> list[WorkerSpec]:
    """Shares the asks out: i goes to process i modulo k, so that each offers a k-th of the rate. A closed loop has no
    more processes than slots; each has its share of them, and of the asks."""
    count = max(1, min(processes, len(load.asks), load.closed or len(load.asks)))
    opened = beforehand(load)
    specs = []
    for at in range(count):
        numbers = list(range(at, len(load.asks), count))
        if load.closed is None:
            numbers.sort(key=lambda number: load.asks[number].intended)
        asks = [load.asks[number] for number in numbers]
        slots = None if load.closed is None else _share(load.closed, at, count)
        specs.append(WorkerSpec(
            host=target.host, port=target.port, tls=target.tls, head=target.head(),
            connections=_share(opened, at, count), closed=slots,
            stop_after=load.stop_after, stall=load.stall, window=load.window, number=numbers, asks=asks,
        ))  # fmt: skip
    return specs


def together(asked: int, seconds: float, news: list[WorkerProgress], firsts: list[float]) -> LoadProgress:
    counts = [name for name in WorkerProgress.__struct_fields__ if name != "firsts"]
    totals = {name: sum(getattr(each, name) for each in news) for name in counts}
    return LoadProgress(**totals, firsts=firsts, seconds=seconds, asked=asked)


def _share(whole: int, at: int, count: int) -> int:
    return whole // count + (at < whole % count)


def beforehand(load: Load) -> int:
    """Connections that are opened before the point: a slot one in a closed loop; in an open loop one for each ask of
    the first tenth of a second, and some more."""
    if load.closed is not None:
        return min(load.closed, len(load.asks))
    at_once = sum(ask.intended < 0.1 for ask in load.asks)
    return max(at_once, min(OPENED, len(load.asks)))


# --- columns


def gather(load: Load, parts: list[WorkerResult], point: str, start: int) -> Samples:
    """Returns all processes' requests in the order of their intended starts."""
    found = {name: _joined(parts, name) for name in COLUMNS}
    cuts = np.cumsum(np.maximum(found["events"] - 1, 0))
    every = np.concatenate([np.frombuffer(part.gaps, np.float32) for part in parts])
    gaps = np.split(every, cuts[:-1]) if len(cuts) else []
    outcome = [word for part in parts for word in part.outcome]
    order = np.lexsort((found["number"], found["intended"]))
    number, intended = found.pop("number")[order], found["intended"][order]
    columns: dict[str, list[Any]] = {
        **{name: column[order].tolist() for name, column in found.items()},
        "point": [point] * len(order),
        "start": [start] * len(order),
        "gaps": [gaps[at] for at in order],
        "asked_prompt": [load.asks[at].asked_prompt for at in number],
        "asked_output": [load.asks[at].asked_output for at in number],
        "window": ((intended >= load.window[0]) & (intended < load.window[1])).tolist(),
        "outcome": [outcome[at] for at in order],
    }
    return from_lists(columns)


def see(load: Load, parts: list[WorkerResult], begin: float) -> ClientReport:
    waited = _joined(parts, "first") - _joined(parts, "intended")
    waited = waited[~np.isnan(waited)]
    seconds = max(part.wall for part in parts)
    requests = sum(len(part.outcome) for part in parts)
    return ClientReport(
        lag_p99=max(_p99(np.frombuffer(part.lags, np.float32)) for part in parts),
        busy=max(part.cpu / max(part.wall, 1e-9) for part in parts),
        late_p99=_p99(np.concatenate([np.frombuffer(part.late, np.float32) for part in parts])),
        late_limit=max(LATE, LATE_SHARE * float(np.median(waited))) if len(waited) else LATE,
        events_per_second=float(_joined(parts, "events").sum()) / max(seconds, 1e-9),
        requests_per_second=requests / max(seconds, 1e-9),
        processes=len(parts),
        cpu=sum(part.cpu for part in parts),
        seconds=seconds,
        again=sum(part.again for part in parts),
        begin=begin,
        troubles={word: text for part in reversed(parts) for word, text in part.troubles.items()},
    )


def _joined(parts: list[WorkerResult], name: str) -> npt.NDArray[Any]:
    """Returns [requests]: one of COLUMNS, of all processes."""
    return np.concatenate([np.frombuffer(part.columns[name], COLUMNS[name]) for part in parts])


def _p99(values: npt.NDArray[Any]) -> float:
    """Returns the 99th percentile, never below 0: a timer may be early."""
    return max(0.0, float(np.quantile(values, 0.99))) if len(values) else 0.0
