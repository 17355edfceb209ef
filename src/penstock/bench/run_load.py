"""Runs a load over k client processes. It divides the planned requests among them and returns the
results as samples, in order. Knows shares and columns; not the requests' content (workload.py) nor
a run's load levels (point_planner.py).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.almanac.record import BUSY, HEADROOM, LAG, LATE, LATE_SHARE, ClientHealth
from penstock.almanac.samples import Samples, from_lists
from penstock.bench.endpoint import Endpoint
from penstock.bench.worker_pool import Hear, WorkerPool
from penstock.bench.worker_protocol import Load, RequestResult, WorkerResult, WorkerSpec

# most connections that an open loop opens in advance, unless more requests are sent at once
OPENED = 256


@dataclass(frozen=True)
class ClientReport:
    """The client processes' measurements of themselves at one load level. lag_p99: event loop lag
    in seconds. busy: CPU share of the busiest process. late_p99: delay of sending in seconds;
    late_limit: its highest acceptable value. troubles: outcome -> one of its error messages. cpu:
    CPU seconds of all processes.
    """

    lag_p99: float
    busy: float
    late_p99: float
    late_limit: float
    events_per_second: float
    requests_per_second: float
    cpu: float
    seconds: float
    begin: float
    troubles: dict[str, str] = field(default_factory=dict)

    def look(self, ceiling_events: float | None, ceiling_requests: float | None) -> ClientHealth:
        """Returns this report as a benchmark record has it. ceiling_*: calibrated limits per
        second; None: not calibrated. The headroom is the smaller of those for events and for
        requests."""
        asked = (
            (ceiling_events, self.events_per_second),
            (ceiling_requests, self.requests_per_second),
        )
        rooms = [ceiling / rate for ceiling, rate in asked if ceiling is not None and rate > 0]
        headroom = min(1e9, *rooms) if rooms else None
        cramped = self.busy > BUSY if headroom is None else headroom < HEADROOM
        short = cramped or self.lag_p99 > LAG or self.late_p99 > self.late_limit
        busy, late = min(1.0, self.busy), self.late_p99
        return ClientHealth(
            lag_p99=self.lag_p99, busy=busy, headroom=headroom, late_p99=late, short=short
        )


def run_load(
    target: Endpoint,
    load: Load,
    *,
    point: str,
    start: int,
    processes: int,
    progress: Hear | None = None,
    pool: WorkerPool | None = None,
) -> tuple[Samples, ClientReport]:
    """Sends a load's requests and collects the answers. A failed request is a row of the samples,
    whatever the reason; a request that the load level's end made superfluous has none. progress:
    called a few times a second; when it returns True, the load level ends and running requests are
    unfinished. pool: client processes shared with other loads. Raises EngineError when a client
    process ends by itself.
    """

    with nullcontext(pool) if pool is not None else WorkerPool() as clients:
        parts = clients.run(shares(target, load, processes), progress)
    samples = gather(load, parts, point, start)
    return samples, see(samples, parts, clients.begin)


def shares(target: Endpoint, load: Load, processes: int) -> list[WorkerSpec]:
    """Divides the requests among k processes: request i goes to process i modulo k, so that each
    has a k-th of the rate. A closed loop has no more processes than slots; its slots are divided
    too."""
    count = max(1, min(processes, len(load.asks), load.closed or len(load.asks)))
    opened = beforehand(load)
    specs = []
    for at in range(count):
        numbers = list(range(at, len(load.asks), count))
        if load.closed is None:
            numbers.sort(key=lambda number: load.asks[number].intended)
        part = msgspec.structs.replace(
            load,
            asks=[load.asks[number] for number in numbers],
            closed=None if load.closed is None else _share(load.closed, at, count),
        )
        specs.append(WorkerSpec(target, part, numbers, _share(opened, at, count)))
    return specs


def _share(whole: int, at: int, count: int) -> int:
    return whole // count + (at < whole % count)


def beforehand(load: Load) -> int:
    """Returns the number of connections to open before the load level begins. In a closed loop it
    is one per slot; in an open loop one for each request of the first tenth of a second, and some
    more."""
    if load.closed is not None:
        return min(load.closed, len(load.asks))
    at_once = sum(ask.intended < 0.1 for ask in load.asks)
    return max(at_once, min(OPENED, len(load.asks)))


# --- results of all client processes together


def gather(load: Load, parts: list[WorkerResult], point: str, start: int) -> Samples:
    """Returns all processes' requests in the order of their intended starts."""
    rows = sorted(
        (row for part in parts for row in part.requests), key=lambda row: (row.intended, row.number)
    )
    asks = [load.asks[row.number] for row in rows]
    opens, closes = load.window
    return from_lists(
        {
            **{
                name: [getattr(row, name) for row in rows]
                for name in RequestResult.__struct_fields__
            },
            "gaps": [np.frombuffer(row.gaps, np.float32) for row in rows],
            "point": [point] * len(rows),
            "start": [start] * len(rows),
            "asked_prompt": [ask.asked_prompt for ask in asks],
            "asked_output": [ask.asked_output for ask in asks],
            "window": [opens <= row.intended < closes for row in rows],
        }
    )


def see(samples: Samples, parts: list[WorkerResult], begin: float) -> ClientReport:
    waited = samples.first - samples.intended
    waited = waited[~np.isnan(waited)]
    seconds = max(part.wall for part in parts)
    return ClientReport(
        lag_p99=max(_p99(np.frombuffer(part.lags, np.float32)) for part in parts),
        busy=max(part.cpu / max(part.wall, 1e-9) for part in parts),
        late_p99=_p99(np.concatenate([np.frombuffer(part.late, np.float32) for part in parts])),
        late_limit=max(LATE, LATE_SHARE * float(np.median(waited))) if len(waited) else LATE,
        events_per_second=float(samples.events.sum()) / max(seconds, 1e-9),
        requests_per_second=len(samples) / max(seconds, 1e-9),
        cpu=sum(part.cpu for part in parts),
        seconds=seconds,
        begin=begin,
        troubles={word: text for part in reversed(parts) for word, text in part.troubles.items()},
    )


def _p99(values: npt.NDArray[Any]) -> float:
    """Returns the 99th percentile of the values, at least 0 (a delay is negative if a timer fired
    early)."""
    return max(0.0, float(np.quantile(values, 0.99))) if len(values) else 0.0
