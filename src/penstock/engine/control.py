"""ControlQueue: control commands that run between steps. A client sends them: load new weights,
empty the prefix cache, sleep, wake up. They run one at a time.

While a command waits, and while the engine sleeps, no new request is taken up. Running requests are
waited for (`wait`), ended at once with their tokens so far (`abort`), or go on afterwards (`keep`):
then one answer may come from two versions of the weights, and its prompt's KV cache was computed
with the first. Knows an engine and messages; no channel.
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
    """Down: run a control command between steps. number: the client's own count of commands, from
    0, set when sent."""

    what: str
    mode: Mode = "wait"
    folder: str = ""
    version: str | None = None
    shared: SharedWeights | None = None
    level: int = 1
    tags: list[str] | None = None
    number: int = -1


class Controlled(msgspec.Struct, tag="controlled", frozen=True):
    """Up: a control command is done, or was refused and why."""

    number: int
    refused: CarriedError | None = None


class Weights(msgspec.Struct, tag="weights", frozen=True):
    """Up, to all clients: the version of the weights for answers from here on, and the parts asleep
    (weights, KV cache). changing: a control command is running now; it has no time limit."""

    version: str
    asleep: tuple[str, ...] = ()
    changing: bool = False


class ControlQueue:
    """Waiting control commands of one engine, each with the client that sent it."""

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
        """Returns True if a control command waits to be run."""
        return bool(self._asked)

    @property
    def holds(self) -> bool:
        """Returns True if no step may be launched, because a command with mode `keep` waits or the
        engine sleeps."""
        return bool(self._engine.asleep) or (self.waiting and self._asked[0][1].mode == "keep")

    @property
    def defers(self) -> bool:
        """Returns True if new requests must wait, because a command waits or the engine sleeps."""
        return self.waiting or bool(self._engine.asleep)

    def put(self, client: int, word: Control) -> None:
        self._asked.append((client, word))

    def drop(self, client: int) -> None:
        """Drops the commands of a client that has gone."""
        self._asked = deque((who, word) for who, word in self._asked if who != client)

    @property
    def due(self) -> bool:
        """Returns True if the first command can run now."""
        return (
            self.waiting and not self._engine.flights and (self.holds or not self._engine.has_work)
        )

    def next(self) -> tuple[int, Controlled]:
        """Runs the first command. Returns its client and its result."""
        client, word = self._asked.popleft()
        try:
            self._work[word.what](word)
        except PenstockError as error:
            return client, Controlled(word.number, CarriedError.of(error))
        return client, Controlled(word.number)
