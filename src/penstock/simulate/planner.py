"""Planner: finds how many replicas meet latency goals. It simulates fleets of identical engines
that serve a source of requests, and returns the smallest fleet that meets the goals.

Of many identical replicas only a few are simulated (`simulated`), with their share of the requests.
Of a long job only the beginning and the end are simulated; between them a constant rate is assumed.
Knows engines, sources and goals; prints nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.errors import UsageError
from penstock.simulate.asked_load import AskedLoad
from penstock.simulate.fleet import Fleet, FleetOutcome
from penstock.simulate.goals import FleetFigures, FleetGoal, figures_of
from penstock.simulate.load_source import LoadSource
from penstock.simulate.scaling import Scaling
from penstock.simulate.simulated_engine import SimulatedEngine

# replicas that are simulated of many: for a job, and for arriving requests
FEW_OF_JOB, FEW_OF_SERVICE = 2, 4
# samples of a job, in multiples of a replica's rows: at most TURNS_OF_ROWS are simulated; the
# first and the last EDGE_OF_ROWS count as the job's beginning and end
TURNS_OF_ROWS, EDGE_OF_ROWS = (8, 2)
ALONE, APART = 24, 1e5  # requests sent one by one, and the seconds between them
# after the last arrival the simulation ends within PATIENCE seconds, or PATIENT times the longest
# goal if that is more
PATIENCE = 60.0
PATIENT = 4.0


@dataclass(slots=True, kw_only=True)
class FleetAnswer:
    """The answer for one fleet: one row of the printed table. simulated: number of replicas
    simulated. missed: missed goals, with the measured values in seconds."""

    engine: SimulatedEngine
    told: str  # short description of the load
    replicas: int
    simulated: int
    figures: FleetFigures
    goals: Sequence[FleetGoal] = ()  # the latency goals
    missed: list[tuple[FleetGoal, float]] = field(default_factory=list)
    # (time, replicas up), where the number changes
    counts: list[tuple[float, int]] = field(default_factory=list)

    @property
    def gpus(self) -> int:
        return self.replicas * self.engine.gpus


class Planner:
    """Simulations of fleets of one engine that serve one source of requests. few: most replicas to
    simulate; None: as many as needed. watch: called with the number of simulated replicas and the
    virtual time."""

    def __init__(
        self,
        engine: SimulatedEngine,
        source: LoadSource,
        goals: Sequence[FleetGoal] = (),
        *,
        few: int | None = None,
        watch: Callable[[int, float], object] = lambda count, now: None,
    ) -> None:
        self.engine, self.source, self.goals, self._watch = engine, source, goals, watch
        self._few = few or (FEW_OF_JOB if source.is_job else FEW_OF_SERVICE)
        self._jobs: dict[tuple[int, int], tuple[FleetFigures, float]] = {}

    def answer(self, replicas: int, *, hurry: bool = False) -> FleetAnswer:
        """Simulates this number of replicas. hurry: True: stop as soon as a goal is certainly
        missed; requests still open count as never ended."""
        simulated = min(replicas, self._few)
        figures = (
            self._job(replicas, simulated)
            if self.source.is_job
            else self._service(replicas, simulated, hurry)
        )
        return FleetAnswer(
            engine=self.engine,
            told=self.source.told,
            replicas=replicas,
            simulated=simulated,
            figures=figures,
            goals=self.goals,
            missed=self._missed(figures),
        )

    def scaled(self, scaling: Scaling) -> FleetAnswer:
        """Simulates replicas whose number an autoscaler sets."""
        load = self.source.arriving()
        fleet = self._fleet(load, scaling.most, scaling)
        figures = self._figures(
            fleet.run(self._until(load.arrival[-1]), lambda now: self._watch(scaling.most, now))
        )
        return FleetAnswer(
            engine=self.engine,
            told=self.source.told,
            replicas=scaling.most,
            simulated=scaling.most,
            figures=figures,
            goals=self.goals,
            missed=self._missed(figures),
            counts=fleet.counts,
        )

    def fewest(self, most: int) -> FleetAnswer:
        """Returns the answer for the fewest replicas, up to `most`, that keep all goals. Raises
        UsageError, with the reason, if no number does."""
        self._refuse_hopeless()
        low, high = 0, 1
        found = self.answer(high, hurry=True)
        while found.missed:
            if high == most:
                goal, reached = found.missed[0]
                took = (
                    f"{reached:.4g} s"
                    if math.isfinite(reached)
                    else "they fall ever further behind"
                )
                raise UsageError(
                    f"{goal.name}, {goal.most:g} s, is missed with {most:,} replicas of"
                    f" {self.engine.name} too: {took}; raise --most, or the goal"
                )
            low, high = high, min(2 * high, most)
            found = self.answer(high, hurry=True)
        while high - low > 1:
            middle = (low + high) // 2
            tried = self.answer(middle, hurry=True)
            if tried.missed:
                low = middle
            else:
                high, found = middle, tried
        return found

    # --- simulating one number of replicas --------------------------------------------------------

    def _service(self, replicas: int, simulated: int, hurry: bool) -> FleetFigures:
        load = self.source.arriving(simulated / replicas)
        fleet = self._fleet(load, simulated)

        def watch(now: float) -> bool:
            self._watch(replicas, now)
            return hurry and any(
                goal.lost(fleet.first, fleet.end, load.arrival, now) for goal in self.goals
            )

        return _times(
            self._figures(fleet.run(self._until(load.arrival[-1]), watch)), replicas / simulated
        )

    def _job(self, replicas: int, simulated: int) -> FleetFigures:
        """Simulates a job whole, or only its beginning and its end. The middle is then assumed to
        run at the rate measured while all rows are full."""
        total, engine = self.source.options.requests or 1, self.engine
        share = math.ceil(total / replicas)  # number of samples that one replica runs
        each = float(np.mean(self.source.job(min(total, 1000)).samples))
        enough = math.ceil(TURNS_OF_ROWS * engine.limits.max_rows / each)
        if share <= enough:
            return _times(
                self._some(simulated, min(total, simulated * share))[0], replicas / simulated, total
            )
        some, rate = self._some(simulated, simulated * enough)
        tokens = some.output_rate * some.seconds
        more = tokens * (share / enough - 1)  # output tokens that are not simulated
        seconds = some.seconds + more / rate
        figures = FleetFigures(
            requests=simulated * share,
            seconds=seconds,
            output_rate=(tokens + more) / seconds,
            busy=(some.busy * some.seconds + more / rate) / seconds,
            gpu_seconds=seconds * simulated * engine.gpus,
            preemptions=some.preemptions,
        )
        return _times(figures, replicas / simulated, total)

    def _some(self, replicas: int, requests: int) -> tuple[FleetFigures, float]:
        """Simulates a job of this many requests; returns its figures, and the tokens a second in
        its middle."""
        if (replicas, requests) not in self._jobs:
            load = self.source.job(requests)
            fleet = self._fleet(load, replicas)
            figures = figures_of(
                fleet.run(watch=lambda now: self._watch(replicas, now)),
                self.engine.gpus,
                warm=False,
            )
            # a job's requests wait for their turn, so their times have no meaning
            figures.times = {}
            edge = EDGE_OF_ROWS * replicas * self.engine.limits.max_rows
            last = int(load.start[-1]) - edge
            self._jobs[replicas, requests] = (
                figures,
                fleet.rate_between(edge, last) if last > edge else math.nan,
            )
        return self._jobs[replicas, requests]

    def _fleet(self, load: AskedLoad, replicas: int, scaling: Scaling | None = None) -> Fleet:
        engine = self.engine
        engine.check(load)
        return Fleet(
            load, engine.limits, engine.costs, replicas, engine.steps_ahead, scaling=scaling
        )

    def _figures(self, outcome: FleetOutcome) -> FleetFigures:
        return figures_of(outcome, self.engine.gpus, warm=self.source.options.rate is not None)

    def _until(self, last: float) -> float:
        return float(last) + max([PATIENCE, *(PATIENT * goal.most for goal in self.goals)])

    def _missed(self, figures: FleetFigures) -> list[tuple[FleetGoal, float]]:
        return [(goal, goal.reached(figures)) for goal in self.goals if goal.missed(figures)]

    def _refuse_hopeless(self) -> None:
        """Raises UsageError if even a request that is alone on a replica misses a goal: more
        replicas would not help."""
        load = self.source.alone(1 if self.source.is_job else ALONE, APART)
        figures = figures_of(self._fleet(load, 1).run(), self.engine.gpus, warm=False)
        for goal, reached in self._missed(figures):
            what = (
                "a request of the job"
                if self.source.is_job
                else f"with nobody beside a request {goal.name}"
            )
            raise UsageError(
                f"{goal.name}={goal.most / (3600 if goal.measure == 'hours' else 1):g} can't be"
                f" kept by any number of replicas of {self.engine.name}: {what} takes {reached:.4g}"
                " s by itself; what shortens a step is more GPUs a replica (a table of"
                " --tensor-parallel-size), fewer bits, or shorter prompts and answers"
            )


def _times(figures: FleetFigures, factor: float, total: int | None = None) -> FleetFigures:
    """Scales the figures of the simulated replicas to `factor` times as many replicas, each with
    the same share of requests. total: number of requests of the whole job; None: no job."""
    # factor of the numbers of requests and tokens
    more = factor if total is None else total / figures.requests
    return replace(
        figures,
        requests=round(figures.requests * more),
        output_rate=figures.output_rate * more,
        gpu_seconds=figures.gpu_seconds * factor,
    )
