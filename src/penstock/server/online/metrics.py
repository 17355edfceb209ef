"""Metrics for Prometheus with vLLM's names. They differ only in the prefix before the colon.
Counters and gauges come from the engine. Histograms are filled here, and added up over server
processes by a board in shared memory. Times to the first token and between tokens count streamed
answers only. Knows the client's stats and calls.
"""

from __future__ import annotations

import mmap
import os
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from penstock.request import FINISH_REASONS, Delta
from penstock.row_table import MOST_SPECULATIVE_TOKENS
from penstock.server.openai.translate import Call

if TYPE_CHECKING:
    from penstock.engine.async_client import ReplicaState
    from penstock.engine.request_stream import Stream
    from penstock.replicas.replica_set import EngineClient

_SECONDS = (*(a * 10.0**b for b in range(-3, 3) for a in (1, 2.5, 5)), 1000.0)
_TOKENS = tuple(a * 10.0**b for b in range(6) for a in (1, 2, 5))
_SAMPLES = tuple(a * 10.0**b for b in range(4) for a in (1, 2, 5))
# key of the engine's stats -> (metric's name, help)
_GAUGES = {
    "running": ("num_requests_running", "Sequences that have a row."),
    "waiting": ("num_requests_waiting", "Sequences that wait for one."),
    "kv_usage": ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1."),
    "tokens_per_second": (
        "generation_tokens_per_second",
        "Output tokens a second over the last 2 s; 0 at rest.",
    ),
    "expected_seconds_left": (
        "expected_seconds_left",
        "Until all that the engine has is done, at that rate; 0 else.",
    ),
}
# gauges that exist only where the engine knows its device's peak rates
_LIMIT_GAUGES = {
    "hardware_limit": (
        "hardware_limit_perc",
        "Least time by the data sheet over time taken, of the last second's steps; 0 at rest.",
    ),
}
_COUNTERS = {
    "prompt_tokens": (
        "prompt_tokens",
        "Prompt tokens prefilled; a prompt of n samples counts once.",
    ),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "prefix_hit_tokens": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "prefix_query_tokens": (
        "prefix_cache_queries",
        "Prompt tokens looked for in the prefix cache.",
    ),
    "steps": ("engine_steps", "Steps launched."),
    "completed_steps": ("engine_steps_completed", "Steps launched and read."),
    "wasted_tokens": ("wasted_tokens", "Tokens computed for rows that had ended, and thrown away."),
    "jit_compiles": (
        "jit_compiles",
        "Kernels, and stubs that launch them, compiled since the engine was ready.",
    ),
    "jit_loads": ("jit_loads", "Kernels loaded from the disk since the engine was ready."),
    "preemptions": ("num_preemptions", "Rows preempted for want of blocks."),
    "state_hits": (
        "state_snapshot_hits",
        "Prompts that began behind a snapshot of recurrent state.",
    ),
    "state_misses": (
        "state_snapshot_misses",
        "Prompts of whose blocks more were known than there was a snapshot of the state of.",
    ),
    "state_evictions": (
        "state_snapshot_evictions",
        "Snapshots of recurrent state that made room for others.",
    ),
    # only with speculative_config
    "spec_drafts": ("spec_decode_num_drafts", "Times that a row had drafts in a step."),
    "spec_draft_tokens": ("spec_decode_num_draft_tokens", "Tokens drafted."),
    "spec_accepted_tokens": ("spec_decode_num_accepted_tokens", "Drafted tokens that were right."),
}


class Histogram:
    """A histogram for Prometheus. An observation takes a bisection and two additions; the one of
    prometheus-client also takes a lock."""

    __slots__ = ("_bounds", "_counts", "_help", "_sum", "name")

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        self.name, self._help, self._bounds = name, help, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def numbers(self) -> list[float]:
        """The counts by bucket, then the sum of the observations. All can be added up over
        processes."""
        return [*self._counts, self._sum]

    def metric(self, labels: Mapping[str, str], numbers: Sequence[float]) -> Metric:
        """Returns Prometheus' metric of `numbers`, which may be sums over several processes."""
        family = HistogramMetricFamily("penstock:" + self.name, self._help, labels=list(labels))
        total, buckets = 0, []
        # not strict, since the sum comes after the counts
        for bound, count in zip((*map(str, self._bounds), "+Inf"), numbers, strict=False):
            total += int(count)
            buckets.append((bound, total))
        family.add_metric(list(labels.values()), buckets, numbers[-1])
        return family


class Board:
    """Shared memory with a row of numbers per server process. Each process writes its own row and
    reads all.

    The numbers only grow and are written one at a time, so that their sums never decrease,
    whichever process computes them.
    """

    _WIDTH = 512  # room for numbers in a process's row; Metrics has about 270

    def __init__(self, descriptor: int, row: int, rows: int) -> None:
        memory = mmap.mmap(descriptor, rows * self._WIDTH * 8)
        self._numbers = np.frombuffer(memory, np.float64).reshape(rows, self._WIDTH)
        self._row = row
        self.servers = rows
        self.first = row == 0  # True in the one process that prints messages for all

    @classmethod
    def make(cls, rows: int) -> int:
        """Returns a file descriptor of zeroed memory for `rows` processes, freed when the last one
        closes it."""
        descriptor = os.memfd_create("penstock-metrics")
        os.truncate(descriptor, rows * cls._WIDTH * 8)
        return descriptor

    def put(self, numbers: Sequence[float]) -> None:
        self._numbers[self._row, : len(numbers)] = numbers

    def sums(self, count: int) -> list[float]:
        sums: list[float] = self._numbers[:, :count].sum(axis=0).tolist()
        return sums


class Metrics:
    """All metrics of one server, as a Prometheus collector with its own registry. model: the served
    name, a label. board: shared memory if the server has several processes, else None."""

    def __init__(self, client: EngineClient, model: str, board: Board | None = None) -> None:
        self._client = client
        self._board = board
        self._labels = {"model_name": model}
        self.first_token = Histogram(
            "time_to_first_token_seconds", "From body to first token, streamed.", _SECONDS
        )
        self.between_tokens = Histogram(
            "inter_token_latency_seconds", "Between a sample's deltas, streamed.", _SECONDS
        )
        self.end_to_end = Histogram(
            "e2e_request_latency_seconds", "From body to last token.", _SECONDS
        )
        self.asked = Histogram("request_prompt_tokens", "Prompt tokens of a body.", _TOKENS)
        self.made = Histogram("request_generation_tokens", "Tokens made for a body.", _TOKENS)
        self.queued = Histogram(
            "request_queue_time_seconds", "A prompt's, until a step took it up.", _SECONDS
        )
        self.prefilled = Histogram(
            "request_prefill_time_seconds", "From there to its first token.", _SECONDS
        )
        self.decoded = Histogram(
            "request_decode_time_seconds", "From there to its last one.", _SECONDS
        )
        self.inferred = Histogram("request_inference_time_seconds", "Prefill and decode.", _SECONDS)
        self.each_token = Histogram(
            "request_time_per_output_token_seconds",
            "A body's decode time over the tokens of its longest.",
            _SECONDS,
        )
        self.longest = Histogram(
            "request_max_num_generation_tokens", "Tokens of a body's longest sample.", _TOKENS
        )
        self.samples = Histogram("request_params_n", "n of a body.", _SAMPLES)
        self.most = Histogram(
            "request_params_max_tokens", "max_tokens of a body, where it is known.", _TOKENS
        )
        self.finished: dict[str, int] = dict.fromkeys(FINISH_REASONS, 0)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yields every metric, for Prometheus."""
        yield from self._of_engines()
        names, values = list(self._labels), list(self._labels.values())
        success = CounterMetricFamily(
            "penstock:request_success",
            "Samples that ended, by reason.",
            labels=[*names, "finished_reason"],
        )
        numbers = iter(self.share())
        for reason in self.finished:
            success.add_metric([*values, reason], next(numbers))
        yield success
        for histogram in self._histograms:
            yield histogram.metric(self._labels, list(islice(numbers, len(histogram.numbers))))

    def _of_engines(self) -> Iterator[Metric]:
        """Yields the engines' metrics. With several engines, each live one has its number as a
        label."""
        each = self._client.each()
        names, values = list(self._labels), list(self._labels.values())
        weights = GaugeMetricFamily(
            "penstock:weights_info",
            "1, at the version that answers are made with.",
            labels=[*names, "weights_version"],
        )
        weights.add_metric([*values, self._client.weights_version], 1)
        yield weights
        if len(each) > 1:
            ready = GaugeMetricFamily(
                "penstock:replicas_ready", "Replicas that take requests.", labels=names
            )
            ready.add_metric(values, sum(one.ready for one in each))
            yield ready
            names.append("replica")
            yield self._restarts(each, names)
        # A replica's stats are empty until its engine's first message, and complete afterwards.
        told = [
            (_labelled(values, number, len(each)), one.stats)
            for number, one in enumerate(each)
            if one.stats
        ]
        for families, family in (
            (_GAUGES | _LIMIT_GAUGES, GaugeMetricFamily),
            (_COUNTERS, CounterMetricFamily),
        ):
            for key, (name, help) in families.items():
                known = [(labels, stats[key]) for labels, stats in told if key in stats]
                if known:
                    made = family("penstock:" + name, help, labels=names)
                    for labels, value in known:
                        made.add_metric(labels, value)
                    yield made

        yield from self._accepted(told, names)

    def _accepted(
        self, told: Sequence[tuple[list[str], Mapping[str, float]]], names: Sequence[str]
    ) -> Iterator[Metric]:
        """Yields the right drafts by their place among a row's drafts. told: each engine's labels
        and stats."""
        family = CounterMetricFamily(
            "penstock:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were right, by their place among a row's drafts.",
            labels=[*names, "position"],
        )
        for labels, stats in told:
            for place in range(MOST_SPECULATIVE_TOKENS):
                if (right := stats.get(f"spec_accepted_at_{place}")) is not None:
                    family.add_metric([*labels, str(place)], right)
        if family.samples:
            yield family

    def _restarts(self, each: Sequence[ReplicaState], names: Sequence[str]) -> Metric:
        restarts = CounterMetricFamily(
            "penstock:replica_restarts", "Times that a replica came up again.", labels=names
        )
        for number, one in enumerate(each):
            restarts.add_metric(
                _labelled([*self._labels.values()], number, len(each)), one.restarts
            )
        return restarts

    def share(self) -> list[float]:
        """Puts this process's numbers on the board, and returns the sums over all processes."""
        numbers: list[float] = [*self.finished.values()]
        for histogram in self._histograms:
            numbers += histogram.numbers
        if self._board is None:
            return numbers
        self._board.put(numbers)
        return self._board.sums(len(numbers))

    @property
    def _histograms(self) -> tuple[Histogram, ...]:
        return tuple(each for each in vars(self).values() if isinstance(each, Histogram))

    def text(self) -> bytes:
        """Returns the text of /metrics."""
        return generate_latest(self._registry)


def _labelled(values: list[str], replica: int, count: int) -> list[str]:
    return values if count == 1 else [*values, str(replica)]


class CallMetrics:
    """Tokens, finish reasons and times of one call. background: True if no client waits, so that
    its times are not counted as latencies."""

    def __init__(self, metrics: Metrics, call: Call, *, background: bool) -> None:
        # Keeps no reference to the call, which holds its prompts: this object lives as long as the
        # connection, whose reference cycle may stay for minutes.
        self.stream, self.n, self.choices = call.stream, call.sampling.n, call.choices
        self._most = call.sampling.max_tokens
        self.prompt_tokens = call.prompt_tokens
        self.made = 0  # number of output tokens so far
        # seconds until the first token arrived; without streaming, until it was sampled
        self.first: float | None = None
        self.ends: dict[str, int] = {}  # finish reason -> number of samples
        self._metrics, self._background = metrics, background
        self._start = time.perf_counter()
        # (prompt, sample) -> [time of its last delta, tokens]
        self._samples: dict[tuple[int, int], list[float]] = {}

    def note(self, at: int, deltas: Sequence[Delta]) -> None:
        """Counts new deltas of the prompt with index `at`. Takes 0.6 us per delta, or per token of
        a streamed answer."""
        now, streamed, samples = (
            time.perf_counter(),
            self.stream and not self._background,
            self._samples,
        )
        if self.first is None and self.stream:
            self.first = now - self._start
        for delta in deltas:
            tokens = len(delta.token_ids)
            self.made += tokens
            known = samples.get((at, delta.index))
            if known is None:
                samples[at, delta.index] = [now, tokens]
                if streamed:
                    self._metrics.first_token.observe(now - self._start)
            else:
                if streamed:
                    self._metrics.between_tokens.observe(now - known[0])
                known[0] = now
                known[1] += tokens
            if delta.finish_reason is not None:
                self._end(delta.finish_reason)

    def close(self, streams: Sequence[Stream]) -> None:
        """Adds the values that are known only at the end of a complete call to the histograms."""
        metrics, longest = (
            self._metrics,
            int(max((tokens for _, tokens in self._samples.values()), default=0)),
        )
        begun = [stream.asked.begun for stream in streams if stream.asked.begun is not None]
        if self.first is None and begun:
            self.first = min(begun) - self._start
        metrics.asked.observe(self.prompt_tokens)
        metrics.made.observe(self.made)
        metrics.longest.observe(longest)
        metrics.samples.observe(self.n)
        if self._most is not None:
            metrics.most.observe(self._most)
        if not self._background:
            self._observe_times(streams, longest)
        self._samples.clear()

    def cut(self) -> None:
        """Counts the unfinished samples of a cancelled or failed call as aborted."""
        left = self.choices - sum(self.ends.values())
        if left > 0:
            self._metrics.finished["abort"] += left
            self.ends["abort"] = left
        self._samples.clear()

    def _observe_times(self, streams: Sequence[Stream], longest: int) -> None:
        metrics, now, decoded = self._metrics, time.perf_counter(), 0.0
        metrics.end_to_end.observe(now - self._start)
        for asked in (stream.asked for stream in streams):
            if asked.begun is not None:
                metrics.queued.observe(asked.waited)
                metrics.prefilled.observe(max(0.0, asked.begun - self._start - asked.waited))
                metrics.decoded.observe(now - asked.begun)
                metrics.inferred.observe(max(0.0, now - self._start - asked.waited))
                decoded = max(decoded, now - asked.begun)
        if longest > 1:
            metrics.each_token.observe(decoded / (longest - 1))

    def _end(self, reason: str) -> None:
        self._metrics.finished[reason] += 1
        self.ends[reason] = self.ends.get(reason, 0) + 1
