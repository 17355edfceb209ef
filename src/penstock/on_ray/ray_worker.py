"""A worker of `--on ray`: one engine in a Ray actor, and the words that cross between it and the
driver, as typed msgpack. It knows an LLM; of the job only the prompts that it is given.
"""

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

TURN = 0.1  # seconds after which a turn tells what has ended


class WorkerHello(msgspec.Struct, tag="hello", frozen=True):
    """Up, first: the engine is ready. identity: what samples depend on, as this machine sees it."""

    penstock: str
    machine: str
    rows: int
    sampling_defaults: dict[str, float | int]
    identity: dict[str, Any]


class TurnNews(msgspec.Struct, frozen=True):
    """Up: what has ended, by the numbers that the driver gave. tokens: all that this engine has
    made so far."""

    finished: list[Finished]
    tokens: int


class RayWorker:
    """What the actor runs. Its engine's fault is its own end: Ray tells the driver, which has
    another one started."""

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
        """Loads the engine. Returns a WorkerHello, or a CarriedError where it can't be loaded by a
        user's hand."""
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
        """Takes numbered prompts and works for TURN seconds, to the end of a step, or until nothing
        is left. Returns TurnNews.

        A generator over the engine stays where it is between two turns; the driver has the next one
        waiting here before this one ends, so that the engine stands still for a millisecond.
        """
        try:
            for number, prompt in msgspec.msgpack.decode(given, type=list[tuple[int, Prompt]]):
                prompt.key = number
                self._waiting.append(prompt)
            return msgspec.msgpack.encode(self._work(time.monotonic() + TURN))
        except Exception:  # noqa: BLE001 - its engine is broken, whatever it was: a new one is in order
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
    """Prompts as an engine takes them. When it has had all, it asks again at its next step: there
    may be more then."""

    def __init__(self, waiting: deque[Prompt]) -> None:
        self._waiting = waiting

    def __iter__(self) -> _Taken:
        return self

    def __next__(self) -> Prompt:
        if not self._waiting:
            raise StopIteration
        return self._waiting.popleft()


def _plain(ended: Finished) -> Finished:
    """With logprobs as lists, which cross."""
    if ended.output is not None and ended.output.logprobs is not None:
        ended.output.logprobs = list(ended.output.logprobs)
    return ended
