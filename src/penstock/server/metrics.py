"""Numbers for Prometheus: vLLM's names after the colon, so that a dashboard needs only its prefix changed.

Counters and gauges are the engine's own, read when asked for; histograms are filled here, as answers go out. Where
several processes serve one engine, each puts what it has counted on a board in shared memory, and whichever is asked
gives the sums. It knows the client's stats and this server's calls. Time to first token and time between tokens are
those of streamed answers: of the others nobody outside the engine sees a token before the end.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from penstock.request import FINISH_REASONS

if TYPE_CHECKING:
    from penstock.engine.async_client import AsyncClient

_SECONDS = (*(a * 10.0**b for b in range(-3, 3) for a in (1, 2.5, 5)), 1000.0)
_TOKENS = tuple(a * 10.0**b for b in range(6) for a in (1, 2, 5))
# stats key -> (metric, help)
_GAUGES = {
    "running": ("num_requests_running", "Sequences that have a row."),
    "waiting": ("num_requests_waiting", "Sequences that wait for one."),
    "kv_usage": ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1."),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens prefilled; a prompt of n samples counts once."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "prefix_hit_tokens": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "prefix_query_tokens": ("prefix_cache_queries", "Prompt tokens looked for in the prefix cache."),
    "steps": ("engine_steps", "Steps launched."),
    "wasted_tokens": ("wasted_tokens", "Tokens computed for rows that had ended, and thrown away."),
    "preemptions": ("num_preemptions", "Rows preempted for want of blocks."),
}


class Histogram:
    """Counts by bucket; one observation is a bisection and two additions (prometheus-client's own takes a lock)."""

    __slots__ = ("_bounds", "_counts", "_help", "_name", "_sum")

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        self._name, self._help, self._bounds = name, help, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def numbers(self) -> list[float]:
        """Counts by bucket, then the sum of what was observed: all that adds up over processes."""
        return [*self._counts, self._sum]

    def metric(self, labels: Mapping[str, str], numbers: Sequence[float]) -> Metric:
        """Prometheus' form of `numbers`: these, or those of several processes added up."""
        family = HistogramMetricFamily("penstock:" + self._name, self._help, labels=list(labels))
        total, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), numbers, strict=False):  # the sum comes last
            total += int(count)
            buckets.append((bound, total))
        family.add_metric(list(labels.values()), buckets, numbers[-1])
        return family


class Board:
    """A row of numbers a server process, in memory that all of them share. Each writes its own row and reads all.

    The numbers only grow and one is written at a time, so sums never fall, whichever process is asked.
    """

    _WIDTH = 256  # numbers that a row has room for; Metrics has 107

    def __init__(self, descriptor: int, row: int, rows: int) -> None:
        memory = mmap.mmap(descriptor, rows * self._WIDTH * 8)
        self._numbers = np.frombuffer(memory, np.float64).reshape(rows, self._WIDTH)
        self._row = row
        self.servers = rows

    @classmethod
    def make(cls, rows: int) -> int:
        """A descriptor of empty memory for so many processes; it goes when the last of them has."""
        descriptor = os.memfd_create("penstock-metrics")
        os.truncate(descriptor, rows * cls._WIDTH * 8)
        return descriptor

    def put(self, numbers: Sequence[float]) -> None:
        self._numbers[self._row, : len(numbers)] = numbers

    def sums(self, count: int) -> list[float]:
        sums: list[float] = self._numbers[:, :count].sum(axis=0).tolist()
        return sums


class Metrics:
    """All metrics of one server; a collector of its own registry. `board`: where it is one of several processes."""

    def __init__(self, client: AsyncClient, model: str, board: Board | None = None) -> None:
        self._client = client
        self._board = board
        self._labels = {"model_name": model}
        self.first_token = Histogram("time_to_first_token_seconds", "From body to first token, streamed.", _SECONDS)
        self.between_tokens = Histogram("inter_token_latency_seconds", "Between a sample's deltas, streamed.", _SECONDS)
        self.end_to_end = Histogram("e2e_request_latency_seconds", "From body to last token.", _SECONDS)
        self.asked = Histogram("request_prompt_tokens", "Prompt tokens of a body.", _TOKENS)
        self.made = Histogram("request_generation_tokens", "Tokens made for a body.", _TOKENS)
        self.finished: dict[str, int] = dict.fromkeys(FINISH_REASONS, 0)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())
        stats = self._client.stats()  # empty until the engine has first spoken, and then whole
        for key, (name, help) in _GAUGES.items() if stats else ():
            gauge = GaugeMetricFamily("penstock:" + name, help, labels=names)
            gauge.add_metric(values, stats[key])
            yield gauge
        for key, (name, help) in _COUNTERS.items() if stats else ():
            counter = CounterMetricFamily("penstock:" + name, help, labels=names)
            counter.add_metric(values, stats[key])
            yield counter
        success = CounterMetricFamily(
            "penstock:request_success", "Samples that ended, by reason.", labels=[*names, "finished_reason"]
        )
        numbers = iter(self.share())
        for reason in self.finished:
            success.add_metric([*values, reason], next(numbers))
        yield success
        for histogram in self._histograms:
            yield histogram.metric(self._labels, list(islice(numbers, len(histogram.numbers))))

    def share(self) -> list[float]:
        """Puts this process's numbers on the board, and gives those of all processes added up."""
        numbers: list[float] = [*self.finished.values()]
        for histogram in self._histograms:
            numbers += histogram.numbers
        if self._board is None:
            return numbers
        self._board.put(numbers)
        return self._board.sums(len(numbers))

    @property
    def _histograms(self) -> tuple[Histogram, ...]:
        return self.first_token, self.between_tokens, self.end_to_end, self.asked, self.made

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of time: names are known only to `collect`."""
        return []

    def text(self) -> bytes:
        """The page of /metrics."""
        return generate_latest(self._registry)
