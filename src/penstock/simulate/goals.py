"""Latency goals, such as `ttft_p95=1.0`. Also the figures of a simulation that they are compared
with.

    ttft_pN, tpot_pN, e2e_pN   seconds, for N % of the requests: to the first token, for each
                               further token, to the end
    hours                      of a job, from its beginning to its end

Knows outcomes; no engines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.errors import UsageError
from penstock.simulate.asked_load import Float64
from penstock.simulate.fleet import FleetOutcome

# requests that arrive in this first share of the arrival time are not counted, because the fleet
# starts empty
WARM = 0.1
_GOAL = re.compile(r"^(ttft|tpot|e2e)_p(\d{1,2}(?:\.\d+)?)$")
SHOWN = (50.0, 95.0)  # percentiles of latencies that are shown


@dataclass(frozen=True, slots=True)
class FleetGoal:
    """A goal: an upper bound of a latency's percentile in seconds. percent 0: a bound of the whole
    time of a job (`hours`)."""

    name: str
    measure: str
    percent: float
    most: float  # largest value that meets the goal, in seconds

    def missed(self, figures: FleetFigures) -> bool:
        return not self.reached(figures) <= self.most

    def lost(self, first: Float64, end: Float64, arrival: Float64, now: float) -> bool:
        """Returns True if the goal is missed already at time `now`, because too many requests are
        late. Always False for time per token, which is known only at a request's end."""
        if self.measure not in ("ttft", "e2e"):
            return False
        then = first if self.measure == "ttft" else end
        late = np.where(np.isnan(then), now, then) - arrival > self.most
        return int(late.sum()) > (1 - self.percent / 100) * late.size + WARM * late.size

    def reached(self, figures: FleetFigures) -> float:
        """Returns the measured value of the goal, in seconds."""
        return (
            figures.seconds
            if self.measure == "hours"
            else figures.percentile(self.measure, self.percent)
        )


def parse_goals(told: Sequence[str], *, job: bool) -> list[FleetGoal]:
    """Parses goals. Raises UsageError for an invalid goal, or one that does not fit the kind of
    load."""
    found = []
    for text in told:
        name, _, number = text.partition("=")
        shape = _GOAL.match(name)
        try:
            most = float(number)
        except ValueError:
            most = math.nan
        if not (shape or name == "hours") or not (math.isfinite(most) and most > 0):
            raise UsageError(
                f"{text!r} is no goal: write ttft_p95=1.0, tpot_p50=0.03, e2e_p99=20 (seconds), or"
                " hours=2 of a job",
                param="goal",
            )
        if job == bool(shape):
            other = "hours=2" if job else "ttft_p95=1.0"
            raise UsageError(
                f"{name} is no goal of {'a job' if job else 'requests that arrive'}: write {other}"
            )
        if shape:
            found.append(FleetGoal(name, shape[1], float(shape[2]), most))
        else:
            found.append(FleetGoal(name, "hours", 0.0, 3600 * most))
    return found


@dataclass(slots=True, kw_only=True)
class FleetFigures:
    """The figures of a fleet. Times are of the counted requests; infinite for requests that had not
    ended."""

    requests: int
    seconds: float  # a job's whole time; for arriving requests, the whole simulation
    output_rate: float  # output tokens a second, all replicas together
    busy: float  # share of the time in which devices had work
    gpu_seconds: float
    preemptions: int = 0
    times: dict[str, Float64] = field(default_factory=dict)

    def percentile(self, measure: str, percent: float) -> float:
        """Returns the percentile in seconds, rounded up to the next request's, so that at least
        this share of requests keeps it."""
        found = self.times[measure]
        return float(np.percentile(found, percent, method="higher")) if found.size else math.nan

    def told(self) -> dict[str, float]:
        """Returns the printed figures by name."""
        shown = {
            f"{m}_p{p:g}": self.percentile(m, p)
            for m, column in self.times.items()
            if column.size
            for p in SHOWN
        }
        return {
            "requests": self.requests,
            "seconds": self.seconds,
            "output_rate": self.output_rate,
            "busy": self.busy,
            "gpu_hours": self.gpu_seconds / 3600,
            "preemptions": self.preemptions,
            **shown,
        }


def figures_of(outcome: FleetOutcome, gpus: int, *, warm: bool) -> FleetFigures:
    """Returns the figures of a simulation's outcome. gpus: GPUs of a replica. warm: True: leave out
    the requests of the first WARM of the time."""
    load = outcome.load
    begin, stop = float(load.arrival[0]), float(load.arrival[-1])
    counted = (
        load.arrival >= begin + WARM * (stop - begin) if warm else np.ones(len(load), np.bool_)
    )
    first = np.where(np.isnan(outcome.first), np.inf, outcome.first) - load.arrival
    end = np.where(np.isnan(outcome.end), np.inf, outcome.end) - load.arrival
    behind = np.maximum(np.maximum.reduceat(load.output, load.start[:-1]) - 1, 1)
    with np.errstate(invalid="ignore"):
        each = np.where(np.isinf(end), np.inf, (end - first) / behind)
    return FleetFigures(
        requests=len(load),
        seconds=outcome.seconds,
        output_rate=outcome.output_tokens / outcome.seconds,
        busy=sum(outcome.busy) / max(outcome.up, 1e-9),
        gpu_seconds=outcome.up * gpus,
        preemptions=outcome.preemptions,
        times={"ttft": first[counted], "tpot": each[counted], "e2e": end[counted]},
    )
