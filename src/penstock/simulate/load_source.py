"""LoadSource: makes the requests of a simulation. Their lengths come from a workload shape or a
trace. They arrive at a rate, by a curve of the day, at the trace's own times, or all at once as a
job.

All random numbers come from the seed. Knows options and traces; no engine.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError
from penstock.schedule.step import Int32, Int64
from penstock.simulate.asked_load import AskedLoad
from penstock.simulate.read_trace import TraceRow, read_trace

MOST_REQUESTS = 2_000_000  # most requests of a load that is simulated whole
_SHAPE = re.compile(r"^([1-9]\d{0,6})x([1-9]\d{0,6})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The user's description of the requests. lengths: answers' lengths for a shape: `exact`, or
    `geometric` with the shape's mean, as if each token ended the answer with equal probability.
    curve: `seconds` is divided into equal parts; the request rate in part i is curve[i] times the
    rate. requests: requests of a job; None: requests arrive.
    """

    shape: str | None = None
    trace: Path | None = None
    samples: int = 1
    lengths: str = "exact"
    max_tokens: int | None = None
    prompt_tokens: int | None = None
    shared_tokens: int = 0
    rate: float | None = None
    seconds: float = 600.0
    curve: tuple[float, ...] = ()
    requests: int | None = None
    load_times: float = 1.0
    seed: int = 0


class LoadSource:
    """Makes requests of one kind. Raises UsageError when options contradict each other."""

    def __init__(self, options: LoadOptions) -> None:
        self.options = options
        if (options.shape is None) == (options.trace is None):
            raise UsageError("say what is asked: --shape INxOUT, or --trace FILE", param="shape")
        self._rows: list[TraceRow] | None = None
        self._prompt = self._output = 0
        if options.trace is not None:
            self._rows = read_trace(options.trace, options.prompt_tokens)
            self._refuse_of_shapes()
        else:
            self._read_shape(options.shape or "")
        self._check_measure()

    @property
    def is_job(self) -> bool:
        """Returns True for a job, whose requests all wait from the start."""
        return self.options.requests is not None

    @property
    def told(self) -> str:
        """Returns a short description of the load."""
        options = self.options
        what = (
            options.trace.name if options.trace else f"{options.shape} tokens ({options.lengths})"
        )
        what += f", {options.samples:,} samples each" if options.samples > 1 else ""
        if options.requests is not None:
            return f"a job of {options.requests:,} request{'s' * (options.requests != 1)}, {what}"
        if options.rate is None:
            return f"{what}, as it came" + self._times
        rate = options.rate * options.load_times
        curve = f" by a curve of {len(options.curve)} parts" if options.curve else ""
        return f"{rate:g} request{'s' * (rate != 1)}/s{curve}, {what}"

    @property
    def _times(self) -> str:
        return (
            f", {self.options.load_times:g} times as fast" if self.options.load_times != 1 else ""
        )

    def times(self, factor: float) -> LoadSource:
        """Returns the same load with arrivals `factor` times as fast. Raises UsageError for a job,
        which has no rate."""
        if self.is_job:
            raise UsageError(
                "load_times is for requests that arrive: a job has no rate", param="load_times"
            )
        whole = {name: getattr(self.options, name) for name in LoadOptions.__slots__}
        return LoadSource(LoadOptions(**{**whole, "load_times": self.options.load_times * factor}))

    def job(self, count: int) -> AskedLoad:
        """Returns a job of `count` requests that all wait from the start."""
        return self._load(np.zeros(count), at_once=True)

    def alone(self, count: int, apart: float) -> AskedLoad:
        """Returns `count` requests, `apart` seconds from each other."""
        return self._load(apart * np.arange(count))

    def arriving(self, share: float = 1.0) -> AskedLoad:
        """Returns the requests that arrive. share: only a random share of them, as a part of the
        fleet's replicas gets."""
        options = self.options
        draw = np.random.default_rng([options.seed, 1])
        if options.rate is None:
            assert self._rows is not None
            arrival = np.array([(row.arrival or 0.0) / options.load_times for row in self._rows])
            kept = np.flatnonzero(draw.random(arrival.size) < share) if share < 1 else None
            return self._load(arrival if kept is None else arrival.take(kept), places=kept)
        rate, heights = options.rate * options.load_times * share, options.curve or (1.0,)
        part = options.seconds / len(heights)
        expected = rate * part * sum(heights)
        if not 1 <= expected <= MOST_REQUESTS:
            raise UsageError(
                f"{expected:,.1f} requests would come in {options.seconds:g} s, 1 to"
                f" {MOST_REQUESTS:,} are simulated: give another --seconds or --rate",
                param="seconds",
            )
        times = [
            place * part + np.sort(draw.uniform(0, part, draw.poisson(rate * height * part)))
            for place, height in enumerate(heights)
        ]
        found = np.concatenate([*times, np.zeros(0 if any(each.size for each in times) else 1)])
        return self._load(found)

    # --- the load's arrays ------------------------------------------------------------------------

    def _load(
        self, arrival: NDArray[Any], *, at_once: bool = False, places: NDArray[Any] | None = None
    ) -> AskedLoad:
        if self._rows is not None:
            return self._of_rows(arrival, at_once, places)
        options, count = self.options, arrival.size
        samples = np.full(count, options.samples)
        draw = np.random.default_rng([options.seed, 2])
        outputs = np.full(count * options.samples, self._output, np.int32)
        if options.lengths == "geometric":
            outputs = np.minimum(
                draw.geometric(1 / self._output, outputs.size), self._limit
            ).astype(np.int32)
        return AskedLoad(
            arrival=arrival,
            prompt=np.full(count, self._prompt, np.int32),
            start=_starts(samples),
            output=outputs,
            limit=np.full(count, self._limit if options.lengths == "geometric" else 0, np.int32),
            shared=np.full(count, options.shared_tokens, np.int32),
            header=np.zeros(count, np.int32),
            at_once=at_once,
        )

    def _of_rows(
        self, arrival: NDArray[Any], at_once: bool, places: NDArray[Any] | None
    ) -> AskedLoad:
        """Returns a load of the trace's rows: the rows with the indices `places`, else all in
        order, repeated if too few."""
        assert self._rows is not None
        each = np.arange(arrival.size) % len(self._rows) if places is None else places
        rows = [self._rows[place] for place in each.tolist()]
        longest = max(max(row.outputs) for row in self._rows)
        headers = {
            name: number
            for number, name in enumerate(dict.fromkeys(row.header for row in self._rows))
        }
        return AskedLoad(
            arrival=arrival,
            prompt=_ints(row.prompt for row in rows),
            start=_starts(_ints(len(row.outputs) for row in rows)),
            output=_ints(output for row in rows for output in row.outputs),
            limit=_ints(row.limit or self.options.max_tokens or longest for row in rows),
            shared=_ints(row.shared for row in rows),
            header=_ints(headers[row.header] for row in rows),
            at_once=at_once,
        )

    @property
    def _limit(self) -> int:
        return self.options.max_tokens or 8 * self._output

    # --- checks of options ------------------------------------------------------------------------

    def _read_shape(self, shape: str) -> None:
        found, options = _SHAPE.match(shape), self.options
        if found is None:
            raise UsageError(
                f"there is no shape {shape!r}: write tokens in x tokens out, as 128x1024",
                param="shape",
            )
        self._prompt, self._output = int(found[1]), int(found[2])
        if options.lengths not in ("exact", "geometric"):
            raise UsageError(
                f"lengths must be exact or geometric, not {options.lengths!r}", param="lengths"
            )
        if options.max_tokens is not None and options.lengths == "exact":
            raise UsageError(
                "max_tokens bounds answers that end by themselves: say --lengths geometric"
            )
        if options.shared_tokens >= self._prompt:
            raise UsageError(
                f"shared_tokens must be below the prompt's {self._prompt}", param="shared_tokens"
            )
        if options.prompt_tokens is not None:
            raise UsageError(
                "prompt_tokens is for a run's rows: a shape says it itself", param="prompt_tokens"
            )

    def _refuse_of_shapes(self) -> None:
        options = self.options
        own = {
            "samples": options.samples != 1,
            "lengths": options.lengths != "exact",
            "shared_tokens": options.shared_tokens != 0,
        }
        for name in (name for name, told in own.items() if told):
            raise UsageError(f"{name} is for a shape: a trace's rows say it themselves", param=name)

    def _check_measure(self) -> None:
        options = self.options
        if options.requests is not None and (
            options.rate is not None or options.curve or options.load_times != 1
        ):
            raise UsageError(
                "a job of --requests has no rate: leave --rate, --curve and --load-times out"
            )
        if options.requests is None and options.rate is None:
            if self._rows is None:
                raise UsageError(
                    "say how much is asked: --rate requests a second, or --requests for a job"
                )
            if self._rows[0].arrival is None:
                raise UsageError(
                    f"{options.trace} doesn't say when its rows arrived: --requests"
                    f" {len(self._rows)} takes them as a job, --rate as requests that arrive",
                    param="trace",
                )
            if options.curve:
                raise UsageError("a curve is of a rate: say --rate", param="curve")
        for name, low in (("rate", 0.0), ("seconds", 0.0), ("load_times", 0.0)):
            value = getattr(options, name)
            if value is not None and not (math.isfinite(value) and value > low):
                raise UsageError(f"{name} must be above 0, not {value:g}", param=name)
        if options.curve and (min(options.curve) < 0 or not max(options.curve)):
            raise UsageError("a curve is of heights from 0 on, one of them above it", param="curve")


def _starts(samples: NDArray[Any]) -> Int64:
    return np.concatenate(([0], np.cumsum(samples, dtype=np.int64)))


def _ints(values: object) -> Int32:
    return np.fromiter(values, np.int32)  # type: ignore[call-overload, no-any-return]
