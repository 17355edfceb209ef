"""Engine: the main loop. It takes requests, launches steps on the device, returns their deltas.

A step is launched before the one before it is read (`steps_ahead`), so the device never waits for
the host. Knows the scheduler and a runner; no text, no processes.
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

_SELDOM = 8  # steps without drafts of which one is measured while the gate rests for long
_LOOK = 2e-4  # seconds between two checks whether the token masks of a step have been made
LEVELS, TAGS = (1, 2), (WEIGHTS, KV_CACHE)


@dataclass(slots=True)
class Refused:
    """A request that the engine refused, and the error."""

    request_id: int
    error: CarriedError


class Engine:
    """A scheduler and a runner, driven by step(). limit: the roofline gauge, if the hardware's peak
    rates are known. masks: makes token masks of structured outputs, shared with the scheduler;
    None: such requests are refused. pace: measures steps, for whoever reads it too."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        steps_ahead: int = 1,
        limit: RooflineGauge | None = None,
        masks: MaskPool | None = None,
        pace: StepPace | None = None,
    ) -> None:
        self.masks = masks
        self.weights_version = FIRST_WEIGHTS
        # parts that sleep ("weights", "kv_cache"); while any sleeps no step may be launched
        self.asleep: tuple[str, ...] = ()
        self.scheduler, self.runner, self.steps_ahead, self.limit = (
            scheduler,
            runner,
            steps_ahead,
            limit,
        )
        self.flights: deque[tuple[StepPlan, Flight]] = deque()
        self._late: tuple[StepPlan, Flight] | None = (
            None  # a late step: its forward is launched, its draw waits for token masks
        )
        self._patience = MaskPatience()
        self._rate, self._pace = _Rate(), pace or StepPace()
        self.completed = 0  # number of steps that were launched and read
        # an exception interrupted a step: the scheduler's columns may be inconsistent
        self.broken = False

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.flights) or self._late is not None

    def submit(self, request: Request, form: Form | None = None) -> Refused | None:
        """Takes a request; returns a Refused if it can never run. form: the compiled grammar of its
        structured output, if there is one already; None: it is compiled now."""
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
                raise  # the request was half added: the scheduler's arrays may be inconsistent
            logging.getLogger(__name__).exception(
                "a request was refused: the scheduler failed at it"
            )
            return Refused(
                request.request_id, CarriedError.of(FaultError("the engine failed at this request"))
            )
        return None

    def cancel(self, request_id: int, sample: int | None = None) -> None:
        """Ends a whole request (sample None), one sample with the next step that is launched, or
        all that have not ended (REST); with REST, a later step returns their tokens so far."""
        self.scheduler.cancel(request_id, sample)

    def step(self, *, launch: bool = True) -> Deltas | None:
        """Launches the next step, if there is one, then reads the oldest one if enough are ahead.
        Returns the deltas it read, or None.

        launch=False: only reads. Tokens of samples ended with REST come first, and nothing is
        launched for them. A step whose rows need token masks is launched without its draw, which
        follows once older steps are read (a late draw).

        An exception inside a step breaks the engine; one raised while waiting for the device does
        not.
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
        """Plans a step and launches it (only its forward, if it draws late). Returns True if there
        was a step."""
        self.broken = True
        begun = time.monotonic()
        plan = self.scheduler.plan()
        if plan is not None:
            if self.limit is not None:
                self.limit.launching(plan)
            planned = time.monotonic()
            flight = self.runner.launch(plan)
            self._pace.launched(planned, planned - begun, time.monotonic() - planned)
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
        """Launches the draw of a late step once its token masks are ready or waiting no longer
        pays. Rows whose mask is missing then draw no token in this step. If all rows lack one, it
        waits for a mask or for the end of the forward."""
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
        """Waits for the oldest step in flight and commits its results."""
        oldest, flight = self.flights[0]
        drafting, *later = [p.proposes > 0 or p.drafts is not None for p, _ in self.flights]
        drafter = self.scheduler.drafting.drafter
        seldom = drafter is not None and drafter.idle and not drafting
        measured = drafter is not None and not (seldom and self.completed % _SELDOM)
        waited = measured and not flight.ready()
        result = flight.fetch()
        fetched = time.monotonic()
        prompt_tokens = 0 if oldest.chunks is None else oldest.chunks.tokens.size
        # measured only for the gate of drafts, by steps without tokens that a grammar forces. Of
        # steps without drafts only where the next step, planned meanwhile, has none either
        queries, drafts = 0, oldest.drafts
        forced = drafts is not None and drafts.tokens is not None
        counts = not forced and not oldest.draws_late and (drafting or not any(later))
        if measured and counts:
            queries = oldest.rows.size + (0 if drafts is None else int(drafts.start[-1]))
        self.broken = True
        self.flights.popleft()
        if self.limit is not None:
            self.limit.read()
        deltas = self.scheduler.commit(oldest, result)
        after, rows = time.monotonic() - fetched, oldest.rows.size
        self._pace.read(rows, prompt_tokens, fetched, queries, drafting, after, waited)
        self.broken = False
        self.completed += 1
        self._rate.look(self.scheduler.counts["generation_tokens"])
        return deltas

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache: later prompts find no block that was computed before."""
        self.scheduler.reset_prefix_cache()

    def update_weights(self, source: WeightsSource, version: str | None = None) -> None:
        """Replaces the model's weights, while no step is in flight. Running requests go on with the
        new weights and keep their prompts' KV cache.

        version: the name stamped on answers from here on; None: the folder's name. Raises
        PenstockError, and then the old weights stay."""
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
        # new weights are awake; the engine stays asleep only if another part sleeps
        if self.asleep:
            self.wake_up(())

    def sleep(self, level: int = 1) -> None:
        """Frees the memory of KV cache and weights, while no step is in flight. level 1 keeps
        weights in host memory, 2 drops them. Running requests are computed again after wake_up and
        go on. Raises UsageError."""
        assert not self.flights and self._late is None, "it falls asleep between steps"
        if level not in LEVELS:
            raise UsageError(
                "level must be 1 (weights go to host memory) or 2 (they are dropped)", param="level"
            )
        self.scheduler.give_back_blocks()
        self.runner.sleep(level)
        self.asleep = self.runner.asleep

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Wakes up the parts named by tags; None: all. Dropped weights sleep until
        `update_weights`. Raises UsageError, or CapacityError if the memory is no longer free."""
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
        """Ends the device's work and the mask processes. Idempotent."""
        self.runner.close()
        if self.masks is not None:
            self.masks.close()

    def stats(self) -> dict[str, float]:
        """Returns the scheduler's and the runner's gauges and counters, the current rate in tokens
        per second, the expected seconds until all known work is done, and, with a roofline gauge,
        the share of the hardware limit reached (`hardware_limit`, 0 while idle)."""
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
    """Output tokens per second over the last _SPAN seconds."""

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
