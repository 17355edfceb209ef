"""ModelledReplica: one engine in virtual time. It has the real scheduler, and a modelled device
whose steps take times from a table.

    turn():  plan -> launch, which takes effect when the device is free -> read the oldest flight,
             if enough are ahead -> commit

A turn is one pass of the engine's loop; it works as in engine/engine.py, and so does the pace that
is reported to the router. Knows a load's lengths; no other replica.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.engine.pace import StepPace
from penstock.schedule.leap import Leaper
from penstock.schedule.output_processor import OutputProcessor
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.scheduler_config import SchedulerConfig
from penstock.schedule.step import Int32, Int64, StepPlan, StepTokens
from penstock.simulate.asked_load import AskedLoad
from penstock.simulate.modelled_outputs import WORD, ModelledOutputs
from penstock.simulate.step_costs import StepCosts

MOST_AT_ONCE = 4096  # most steps that are planned at once (schedule/leap.py)


@dataclass(slots=True)
class ReadNews:
    """The result of a turn: the requests, by the load's numbers, whose samples drew their first
    token, and those with ended samples."""

    first: Int64  # numbers of the requests that drew a first token
    ended: list[int]  # numbers of the requests with ended samples, once per ended sample
    tokens: int


class ModelledDevice:
    """A device that computes nothing: it draws meaningless tokens, and a row's answer ends at its
    length in the load."""

    def __init__(self, load: AskedLoad, rows: int) -> None:
        self._load = load
        # tokens that each row has stored when a step draws its last token
        self._last: Int32 = np.zeros(rows, np.int32)

    def launch(self, plan: StepPlan) -> tuple[StepTokens, Int64]:
        """Returns the tokens that a step draws, and the requests whose rows draw their first token
        in it."""
        fresh = np.zeros(0, np.int64)
        if plan.joins is not None:
            records, load = plan.joins.records, self._load
            rows, numbers = records["row"], records["seed"].astype(np.int64)
            outputs = load.output[load.start[numbers] + records["sample"]]
            prompts = records["prompt_length"]
            self._last[rows] = np.minimum(outputs + prompts, records["limit"]) - 2
            fresh = numbers[records["length"] + 1 == prompts]
        return self.tokens(plan), fresh

    def least_left(self, plan: StepPlan) -> int:
        """Returns the least number of tokens that any row has left after this step."""
        return int((self._last.take(plan.rows) - plan.lengths).min())

    def tokens(self, plan: StepPlan) -> StepTokens:
        """Returns the tokens that a step draws for the device's rows. WORD, END and NO_TOKEN are 1,
        0 and -1."""
        return StepTokens(np.sign(self._last.take(plan.rows) - plan.lengths))


class ModelledReplica:
    """An engine in virtual time. now: the time in seconds at which its host is free for the next
    turn. shortcuts: True: plan several steps at once while no row joins or ends, and store no
    tokens; the results are the same, but the simulation is faster.
    """

    def __init__(
        self,
        load: AskedLoad,
        limits: SchedulerConfig,
        costs: StepCosts,
        steps_ahead: int = 1,
        *,
        shortcuts: bool = True,
    ) -> None:
        self._costs, self._ahead = costs, steps_ahead
        self.scheduler = Scheduler(
            limits, outputs=ModelledOutputs if shortcuts else OutputProcessor
        )
        self.device = ModelledDevice(load, limits.max_rows)
        self.flights: deque[tuple[StepPlan, StepTokens, Int64, float]] = deque()
        self._leaper = Leaper(self.scheduler) if shortcuts and steps_ahead == 1 else None
        self._pace = StepPace()
        self._numbers: list[int] = []  # request id at this replica -> its number in the load
        # free: the time at which the device has finished everything launched
        self.now = self._free = self.busy = 0.0
        self.steps = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.flights)

    def submit(
        self, load: AskedLoad, number: int, at: float, samples: Sequence[int] | None = None
    ) -> int:
        """Submits samples of a request (None: all) and returns its number here. Raises UsageError
        if it can never run."""
        if not self.has_work:
            self.now = max(self.now, at)
        name = len(self._numbers)
        self.scheduler.submit(load.request(number, name, samples))
        self._numbers.append(number)
        return name

    def turn(self, until: float = float("inf")) -> ReadNews | None:
        """Runs one turn of the engine's loop and returns what it read. until: time of the next
        arrival, after which no step may be launched."""
        if self._leaper is not None and len(self.flights) == self._ahead and self._leap(until):
            return None
        plan = self.scheduler.plan()
        if plan is not None:
            self._launched(self._costs.seconds(plan), self._costs.waits(plan))
            self.flights.append((plan, *self.device.launch(plan), self._free))
        if not self.flights or (plan is not None and len(self.flights) <= self._ahead):
            assert plan is not None or self.flights or not self.scheduler.plan_is_stuck(), (
                self.scheduler.stats()
            )
            return None
        oldest, tokens, fresh, ended = self.flights.popleft()
        self.now = max(self.now, ended)
        self._read(oldest)
        before = self.scheduler.counts["generation_tokens"]
        deltas = self.scheduler.commit(oldest, tokens)
        over = [self._numbers[name] for name in deltas.request[deltas.finish >= 0].tolist()]
        return ReadNews(fresh, over, self.scheduler.counts["generation_tokens"] - before)

    def stats(self) -> dict[str, float]:
        """Returns the stats that a router gets from the engine."""
        return {
            **self._pace.stats(),
            "tokens_left": self.scheduler.expected_tokens_left(),
            "prompt_tokens_left": self.scheduler.admission.prompt_tokens_left(),
            "mean_output_tokens": self.scheduler.lengths.mean,
        }

    @property
    def heard(self) -> int:
        """Returns the number of requests that the replica has received."""
        return len(self._numbers)

    def _launched(self, seconds: float, waits: float = 0.0) -> None:
        """Advances the host's and the device's clock by a launched step of `seconds`. waits: the
        part of them in which an idle device waits for the host to prepare the step."""
        self._pace.launched(self.now)
        self._free = max(self.now, self._free) + seconds - waits
        if waits:
            self.now += seconds  # the host is busy for the whole launch
            self._free = max(self._free, self.now)
        self.busy += seconds - waits
        self.steps += 1

    def _read(self, plan: StepPlan) -> None:
        self._pace.read(
            plan.rows.size, 0 if plan.chunks is None else plan.chunks.tokens.size, self.now
        )

    def _leap(self, until: float) -> bool:
        """Plans several equal steps at once, as long as their turns begin before `until`. Returns
        False if that is not possible."""
        assert self._leaper is not None
        last, _, _, ended = self.flights[-1]
        most = min(self._leaper.steps(last), MOST_AT_ONCE)
        if most < 2 or (most := min(most, self.device.least_left(last))) < 2:
            return False
        took = self._costs.next_seconds(last, most)
        ends = ended + np.cumsum(took)
        steps = 1 + int(np.searchsorted(np.append(ended, ends[:-2]), until)) if most > 1 else 1
        if steps < 2:
            return False
        plan = self._leaper.leap(last, steps, WORD)
        begins = [self.now, ended, *ends.tolist()]
        for each, seconds in enumerate(took[:steps].tolist()):
            self.now = begins[each]
            self._launched(seconds)
            self.now = begins[each + 1]
            self._read(last)
        self.flights[-1] = plan, self.device.tokens(plan), np.zeros(0, np.int64), self._free
        return True
