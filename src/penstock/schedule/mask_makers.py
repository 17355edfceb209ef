"""MaskMakers: interface of the makers of token masks. A sample with a grammar needs a new mask
after each token. MasksHere makes masks in this process.

Masks are requested and returned in shared memory (penstock.mask_board); each sample has an index
there, its place. Knows constraints and places; no rows.
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
    """Constraint of one sample. It stays the same when the sample is preempted and gets another
    row. place: its index on the mask board."""

    place: int
    begun: bool = False  # True once the sample's first mask was requested
    over: bool = False  # True once the sample has ended and its constraint is no longer used


class MaskMakers(Protocol):
    """Makes the masks of one scheduler's samples, concurrently with it. Used from one thread."""

    places: int

    @property
    def board(self) -> MaskBoard:
        """The board with requested and finished masks; valid once `begin` was called."""

    def begin(self, constraint: object) -> int:
        """Returns the place (board index) of a new sample. constraint: result of the request's
        ConstraintFactory."""

    def start(self, places: Int32, tokens: Int32) -> None:
        """Requests the next mask of each place, after its sample drew tokens[i] (AS_IT_STANDS: no
        new token). No mask of these places may be in the making."""

    def wait(self, seconds: float) -> int:
        """Waits up to `seconds` for all masks; returns the number still missing. Raises a
        constraint's error."""

    def end(self, places: Int32) -> None:
        """Frees the places of ended samples, even if a mask is still being made for them."""


@dataclass(slots=True)
class MasksHere:
    """Makes masks in this process from Constraint objects: directly in `start`, or in
    an executor."""

    vocabulary: int
    executor: Executor | None = None
    places: int = 4096
    board: MaskBoard = field(init=False)
    _free: list[int] = field(init=False)
    _constraints: dict[int, Constraint] = field(default_factory=dict)
    _under_way: dict[int, Future[None]] = field(default_factory=dict)
    # places of ended samples whose mask is still being made
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
