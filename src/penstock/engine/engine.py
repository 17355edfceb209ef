"""Engine: the loop. Requests come in, steps go out to the device, and what comes back goes up: one
screen.

A step is launched before the one before it is read (`steps_ahead`): the device never waits for the
host to look. It knows the scheduler and a runner; no text, no processes.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from penstock.children.carried_error import CarriedError
from penstock.engine.pace import StepPace
from penstock.engine.roofline import RooflineGauge
from penstock.errors import EngineError, FaultError, PenstockError, UsageError
from penstock.request import FIRST_WEIGHTS, Request
from penstock.schedule.deltas import Deltas
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.step import KV_CACHE, WEIGHTS, Flight, Runner, StepPlan
from penstock.shared_weights import WeightsSource
from penstock.structured_output.mask_patience import MaskPatience
from penstock.structured_output.mask_pool import Form, MaskPool

_LOOK = 2e-4  # seconds between two looks at masks that a late draw waits for
LEVELS, TAGS = (1, 2), (WEIGHTS, KV_CACHE)


@dataclass(slots=True)
class Refused:
    """A request that never ran, and why."""

    request_id: int
    error: CarriedError


class Engine:
    """A scheduler and a runner, turned by step(). `limit`: where it is known what the hardware can
    do at most. masks: makes those of structured outputs, the scheduler's too; without it such a
    request is refused."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        steps_ahead: int = 1,
        limit: RooflineGauge | None = None,
        masks: MaskPool | None = None,
    ) -> None:
        self.masks = masks
        self.weights_version = FIRST_WEIGHTS
        self.asleep: tuple[str, ...] = ()  # by tags; while something sleeps no step may be launched
        self.scheduler, self.runner, self.steps_ahead, self.limit = (
            scheduler,
            runner,
            steps_ahead,
            limit,
        )
        self.flights: deque[tuple[StepPlan, Flight]] = deque()
        self._late: tuple[StepPlan, Flight] | None = (
            None  # a step whose draw is still to be launched; its forward
        )
        self._patience = MaskPatience()
        self._rate, self._pace = _Rate(), StepPace()
        self.completed = 0  # steps that were launched and read
        # an exception left the middle of a step: the columns are not to be trusted any more
        self.broken = False

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.flights) or self._late is not None

    def submit(self, request: Request, form: Form | None = None) -> Refused | None:
        """Takes a request, or says why it can never run. form: its answer's, where that is known;
        else it is waited for."""
        if self.limit is not None and not self.has_work:
            self.limit.rest()
        try:
            if request.sampling.structured_outputs is None:
                self.scheduler.submit(request)
            else:
                self.scheduler.submit(request, MaskPool.factory(self.masks, request.sampling, form))
        except PenstockError as error:
            return Refused(request.request_id, CarriedError.of(error))
        except Exception:
            if request.request_id in self.scheduler.live:
                raise  # it was half taken in: the columns are not to be trusted any more
            logging.getLogger(__name__).exception(
                "a request was refused: the scheduler failed at it"
            )
            return Refused(
                request.request_id, CarriedError.of(FaultError("the engine failed at this request"))
            )
        return None

    def cancel(self, request_id: int, sample: int | None = None) -> None:
        """Ends a request (None), one sample of it, or all that have not ended (REST), of which a
        step tells."""
        self.scheduler.cancel(request_id, sample)

    def step(self, *, launch: bool = True) -> Deltas | None:
        """Launches the next step if there is one, then reads the oldest if enough are ahead. Gives
        what it read. launch False: reads alone. What cancelled samples had made comes first, and
        nothing is launched for it. A step that draws late is launched up to its draw, which waits
        for what is read.

        An exception in the middle of it breaks the engine; one of waiting for the device alone
        doesn't.
        """
        if self.broken:
            raise EngineError("the engine broke off in the middle of a step: make a new one")
        told = self.scheduler.take_told()
        if told is not None:
            return told
        launched = launch and self._late is None and self._launch()
        deltas = None
        if self._late is not None:
            if self.flights:
                deltas = self._read()
            self._draw(*self._late)
            if deltas is not None:
                return deltas
        if not self.flights or (launched and len(self.flights) <= self.steps_ahead):
            return None
        return self._read()

    def _launch(self) -> bool:
        """Plans a step and launches it, or its forward, if there is one -> whether there was."""
        self.broken = True
        plan = self.scheduler.plan()
        if plan is not None:
            if self.limit is not None:
                self.limit.launching(plan)
            self._pace.launched(time.monotonic())
            flight = self.runner.launch(plan)
            if plan.draws_late:
                self._late = plan, flight
            else:
                self.flights.append((plan, flight))
        elif not self.flights and self.scheduler.has_work and self.scheduler.plan_is_stuck():
            raise EngineError(
                f"the scheduler has work that it cannot place: {self.scheduler.stats()}"
            )
        self.broken = False
        return plan is not None

    def _draw(self, plan: StepPlan, forward: Flight) -> None:
        """Launches the draw of a step when its masks are there, or waiting on doesn't pay: what is
        late then sits out. A step with no mask at all waits for one, or for its forward."""
        missing, held = self.scheduler.await_masks(0.0), self.scheduler.held_rows(plan)
        self._patience.begin(time.monotonic(), held, plan.rows.size - held, missing)
        while missing and (missing := self.scheduler.await_masks(_LOOK)):
            goes_on = self._patience.goes_on(time.monotonic(), missing)
            if not goes_on and (missing < plan.rows.size or forward.ready()):
                break
        self.broken = True
        self.flights.append((plan, self.runner.draw(self.scheduler.draw(plan))))
        self._late = None
        self.broken = False
        self._patience.ended(missing, forward.ready())

    def _read(self) -> Deltas:
        """Waits for the oldest flight and takes it in."""
        oldest, flight = self.flights[0]
        result = flight.fetch()
        prompt_tokens = 0 if oldest.chunks is None else oldest.chunks.tokens.size
        self._pace.read(oldest.rows.size, prompt_tokens, time.monotonic())
        self.broken = True
        self.flights.popleft()
        if self.limit is not None:
            self.limit.read()
        deltas = self.scheduler.commit(oldest, result)
        self.broken = False
        self.completed += 1
        self._rate.look(self.scheduler.counts["generation_tokens"])
        return deltas

    def reset_prefix_cache(self) -> None:
        """What was computed so far is found by no prompt that comes."""
        self.scheduler.reset_prefix_cache()

    def update_weights(self, source: WeightsSource, version: str | None = None) -> None:
        """Puts other weights in the model's place, where no step is out: requests that run go on
        with them, their prompts as they were computed. version: what answers are stamped with from
        here on, None: the folder's name. Raises PenstockError, and the old weights stay."""
        assert not self.flights and self._late is None, "weights are changed between steps"
        if version is None and not isinstance(source, Path):
            raise UsageError(
                "weights_version must name weights that have no folder: give it",
                param="weights_version",
            )
        self.runner.update_weights(source)
        self.weights_version = (
            source.name if version is None and isinstance(source, Path) else str(version)
        )
        self.reset_prefix_cache()
        if self.asleep:  # it had no weights, or others: where nothing else sleeps it wakes up
            self.wake_up(())

    def sleep(self, level: int = 1) -> None:
        """Gives the memory of KV and weights back, where no step is out: 1 keeps weights in host
        memory, 2 drops them. What runs is computed again once it has woken up, and goes on. Raises
        UsageError."""
        assert not self.flights and self._late is None, "it falls asleep between steps"
        if level not in LEVELS:
            raise UsageError(
                "level must be 1 (weights go to host memory) or 2 (they are dropped)", param="level"
            )
        self.scheduler.give_back_blocks()
        self.runner.sleep(level)
        self.asleep = self.runner.asleep

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Has what is named wake up, None: everything. Weights that were dropped sleep until
        `update_weights`. Raises UsageError, CapacityError where the memory is no longer there."""
        unknown = sorted({*(tags or ())} - {*TAGS})
        if unknown:
            raise UsageError(
                f"tags must be of {', '.join(TAGS)}, and {unknown[0]!r} is not", param="tags"
            )
        try:
            self.runner.wake_up(TAGS if tags is None else tags)
        finally:
            self.asleep = self.runner.asleep

    def close(self) -> None:
        """Ends the device's work and the processes that make masks. Idempotent."""
        self.runner.close()
        if self.masks is not None:
            self.masks.close()

    def stats(self) -> dict[str, float]:
        """The scheduler's and the runner's gauges and counters, the rate now, the expected end of
        all that is known, and, where there is a limit, how near to it the steps come
        (`hardware_limit`, 0 at rest)."""
        stats = self.scheduler.stats()
        rate = self._rate.per_second if self.has_work else 0.0
        left = self.scheduler.expected_tokens_left()
        if self.limit is not None:
            stats["hardware_limit"] = self.limit.share if self.has_work else 0.0
        return {
            **stats,
            **self.runner.counts(),
            **self._pace.stats(),
            "tokens_left": left,
            "prompt_tokens_left": self.scheduler.admission.prompt_tokens_left(),
            "completed_steps": self.completed,
            "tokens_per_second": rate,
            "expected_seconds_left": left / rate if rate and left else 0.0,
        }


class _Rate:
    """Output tokens a second over the last seconds."""

    _SPAN = 2.0

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def look(self, tokens: int) -> None:
        now = time.monotonic()
        if self._seen and now - self._seen[-1][0] < self._SPAN / 40:
            return
        self._seen.append((now, tokens))
        while len(self._seen) > 2 and now - self._seen[0][0] > self._SPAN:
            self._seen.popleft()

    @property
    def per_second(self) -> float:
        if len(self._seen) < 2:
            return 0.0
        (first, low), (last, high) = self._seen[0], self._seen[-1]
        return (high - low) / (last - first)
