"""ControlQueue: what a client asks to be done between steps (other weights, an empty cache, a
sleep), one by one.

Until it is done, and as long as the engine sleeps, no request that comes is taken up. What runs is
waited for (`wait`), ended at once and told with what it made (`abort`), or goes on behind it
(`keep`): then an answer may be of two versions of the weights, and its prompt's keys and values are
those of the first. It knows an engine and words; no channel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from penstock.children.carried_error import CarriedError
from penstock.engine.engine import Engine
from penstock.errors import PenstockError
from penstock.shared_weights import SharedWeights

UPDATE, PREFIX_CACHE, SLEEP, WAKE_UP = "update_weights", "reset_prefix_cache", "sleep", "wake_up"
Mode = Literal["wait", "keep", "abort"]


class Control(msgspec.Struct, tag="control", frozen=True):
    """Down: do something between steps. number: the client's, counted from 0 as it is sent."""

    what: str
    mode: Mode = "wait"
    folder: str = ""
    version: str | None = None
    shared: SharedWeights | None = None
    level: int = 1
    tags: list[str] | None = None
    number: int = -1


class Controlled(msgspec.Struct, tag="controlled", frozen=True):
    """Up: it is done, or why not."""

    number: int
    refused: CarriedError | None = None


class Weights(msgspec.Struct, tag="weights", frozen=True):
    """Up, to all clients: what the answers from here on are made with, and what sleeps. changing:
    something is done between steps now, which takes as long as it takes."""

    version: str
    asleep: tuple[str, ...] = ()
    changing: bool = False


class ControlQueue:
    """Controls of one engine, each with the client that asked."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asked: deque[tuple[int, Control]] = deque()
        self._work: dict[str, Callable[[Control], None]] = {
            UPDATE: lambda word: engine.update_weights(
                word.shared or Path(word.folder), word.version
            ),
            PREFIX_CACHE: lambda word: engine.reset_prefix_cache(),
            SLEEP: lambda word: engine.sleep(word.level),
            WAKE_UP: lambda word: engine.wake_up(word.tags),
        }

    @property
    def waiting(self) -> bool:
        """Whether something is to be done."""
        return bool(self._asked)

    @property
    def holds(self) -> bool:
        """Whether no step is to be launched: until it is done, or as long as the engine sleeps."""
        return bool(self._engine.asleep) or (self.waiting and self._asked[0][1].mode == "keep")

    @property
    def defers(self) -> bool:
        """Whether requests that come wait: behind what is to be done,
        or for the engine to wake up."""
        return self.waiting or bool(self._engine.asleep)

    def put(self, client: int, word: Control) -> None:
        self._asked.append((client, word))

    def drop(self, client: int) -> None:
        """Forgets what a client asked that has gone."""
        self._asked = deque((who, word) for who, word in self._asked if who != client)

    @property
    def due(self) -> bool:
        """Whether what runs allows the first thing to be done now."""
        return (
            self.waiting and not self._engine.flights and (self.holds or not self._engine.has_work)
        )

    def next(self) -> tuple[int, Controlled]:
        """Does the first thing. Returns who asked, and how it went."""
        client, word = self._asked.popleft()
        try:
            self._work[word.what](word)
        except PenstockError as error:
            return client, Controlled(word.number, CarriedError.of(error))
        return client, Controlled(word.number)
