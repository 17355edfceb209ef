"""MaskMakers: who makes the masks of samples that are held to something; and MasksHere, who makes
them in this process.

Whoever it is, masks are asked for and found on a board (penstock.mask_board), by place. It knows
constraints and places; no rows.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np

from penstock.errors import EngineError
from penstock.mask_board import AS_IT_STANDS, FORCED, MaskBoard
from penstock.schedule.constraint import Constraint
from penstock.schedule.step import Int32


@dataclass(slots=True, eq=False)
class Guide:
    """What one sample is held to, whatever rows it has: a place of its makers' board."""

    place: int
    begun: bool = False  # whether a mask is there, or being made
    over: bool = False  # its sample has ended: nothing is asked of the constraint any more


class MaskMakers(Protocol):
    """Makes the masks of one scheduler's samples, beside it. For one thread."""

    places: int

    @property
    def board(self) -> MaskBoard:
        """Where they are asked for and found; once something has begun."""

    def begin(self, constraint: object) -> int:
        """Returns the place of a sample that is held to what a request's factory gave."""

    def start(self, places: Int32, tokens: Int32) -> None:
        """Makes each place's next mask: behind tokens[i], or AS_IT_STANDS. None of theirs is being
        made."""

    def wait(self, seconds: float) -> int:
        """Waits until all masks are there, so long at most -> how many are not. Raises what a
        constraint raised."""

    def end(self, places: Int32) -> None:
        """Lets go of samples that have ended; of some a mask may be under way."""


@dataclass(slots=True)
class MasksHere:
    """Makes masks in this process, of objects that are Constraints: where `start` is called, or in
    an executor."""

    vocabulary: int
    executor: Executor | None = None
    places: int = 4096
    board: MaskBoard = field(init=False)
    _free: list[int] = field(init=False)
    _constraints: dict[int, Constraint] = field(default_factory=dict)
    _under_way: dict[int, Future[None]] = field(default_factory=dict)
    # whose samples have ended, and whose masks are under way
    _leaving: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        words = -(-self.vocabulary // 32)
        self.board = MaskBoard.over(
            np.zeros(MaskBoard.size(self.places, words), np.int32), self.places, words
        )
        self._free = list(range(self.places - 1, -1, -1))

    def begin(self, constraint: object) -> int:
        if not self._free:
            raise EngineError(
                f"more than {self.places} samples are held to constraints: ask for fewer at once"
            )
        place = self._free.pop()
        self._constraints[place] = cast(Constraint, constraint)
        return place

    def start(self, places: Int32, tokens: Int32) -> None:
        self.board.ask(places, tokens)
        for place in places.tolist():
            if self.executor is None:
                self._make(place)
            else:
                self._under_way[place] = self.executor.submit(self._make, place)

    def wait(self, seconds: float) -> int:
        done, _ = wait(self._under_way.values(), seconds)
        for place in [place for place, work in self._under_way.items() if work in done]:
            self._under_way.pop(place).result()
            if place in self._leaving:
                self._leaving.discard(place)
                self._free.append(place)
        return len(self._under_way)

    def end(self, places: Int32) -> None:
        for place in places.tolist():
            if place in self._under_way and not self._under_way[place].done():
                self._leaving.add(place)
            else:
                self._free.append(place)

    def _make(self, place: int) -> None:
        constraint, board = self._constraints[place], self.board
        if (token := int(board.token[place])) != AS_IT_STANDS:
            constraint.accept(token)
        certain = constraint.forced()[:FORCED]
        for each in certain:
            constraint.accept(each)
        board.put(place, int(board.asked[place]), certain, constraint.mask())
