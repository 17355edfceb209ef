"""A worker of `--on ray`: one engine as Ray actor. Exchanges typed msgpack messages with the
driver. Knows an LLM; of the job only the prompts that it gets."""

from __future__ import annotations

import os
import platform
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock import __version__
from penstock.children.carried_error import CarriedError
from penstock.config import Config
from penstock.engine.watchdog import STEP_TIMEOUT, Watchdog
from penstock.errors import PenstockError
from penstock.jobs.open_llm import OpenStepped, SteppedEngine, identity
from penstock.llm import Finished, Prompt

TURN = 0.1  # seconds for which one call of `turn` runs steps before it returns their results


class WorkerHello(msgspec.Struct, tag="hello", frozen=True):
    """First message from worker to driver: the engine is ready. identity: settings and files that
    samples depend on, as read on this machine."""

    penstock: str
    machine: str
    rows: int
    sampling_defaults: dict[str, float | int]
    identity: dict[str, Any]


class TurnNews(msgspec.Struct, frozen=True):
    """Message from worker to driver with finished samples, keyed by the driver's prompt numbers.
    tokens: output tokens of this engine since its start."""

    finished: list[Finished]
    tokens: int


class RayWorker:
    """The Ray actor's class. If its engine fails, the actor exits. Ray then tells the driver, which
    starts another worker."""

    def __init__(
        self, knobs: bytes, open_engine: OpenStepped, step_timeout: float = STEP_TIMEOUT
    ) -> None:
        self._knobs: dict[str, Any] = msgspec.msgpack.decode(knobs)
        self._open = open_engine
        self._watchdog = Watchdog(step_timeout)
        self._waiting: deque[Prompt] = deque()
        self._steps: Iterator[list[Finished]] = iter(())
        self._llm: SteppedEngine | None = None

    def open(self) -> bytes:
        """Loads the engine. Returns an encoded WorkerHello, or a CarriedError for an error that the
        user can fix."""
        try:
            config = Config.of(**self._knobs)
            self._llm = self._open(config)
        except PenstockError as error:
            return msgspec.msgpack.encode(CarriedError.of(error))
        self._llm.watch(self._watchdog.stepped)
        facts = self._llm.facts
        return msgspec.msgpack.encode(
            WorkerHello(
                __version__,
                platform.node(),
                facts.max_num_seqs,
                dict(facts.sampling_defaults),
                identity(config),
            )
        )

    def turn(self, given: bytes) -> bytes:
        """Takes numbered prompts, and runs engine steps for TURN seconds or until nothing is left.
        Returns an encoded TurnNews.

        The generator over the engine's steps is kept between calls. The driver queues the next call
        before this one ends, so that the engine idles for only about a millisecond.
        """
        try:
            for number, prompt in msgspec.msgpack.decode(given, type=list[tuple[int, Prompt]]):
                prompt.key = number
                self._waiting.append(prompt)
            return msgspec.msgpack.encode(self._work(time.monotonic() + TURN))
        except Exception:  # noqa: BLE001 - the engine is broken: another worker replaces it
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _work(self, until: float) -> TurnNews:
        assert self._llm is not None, "opened before"
        finished: list[Finished] = []
        self._watchdog.began()
        while time.monotonic() < until:
            ended = next(self._steps, None)
            if ended is not None:
                finished += map(_plain, ended)
            elif self._waiting:
                self._steps = self._llm.steps(
                    _Taken(self._waiting), after_step=self._watchdog.stepped
                )
            else:
                break
        self._watchdog.idle()
        return TurnNews(finished, self._llm.generation_tokens)


class _Taken:
    """Iterator over the waiting prompts. May yield more after StopIteration, since the engine asks
    again at its next step."""

    def __init__(self, waiting: deque[Prompt]) -> None:
        self._waiting = waiting

    def __iter__(self) -> _Taken:
        return self

    def __next__(self) -> Prompt:
        if not self._waiting:
            raise StopIteration
        return self._waiting.popleft()


def _plain(ended: Finished) -> Finished:
    """Converts lazy logprobs to lists, which msgpack can encode."""
    if ended.output is not None and ended.output.logprobs is not None:
        ended.output.logprobs = list(ended.output.logprobs)
    return ended
