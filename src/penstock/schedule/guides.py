"""Guides: a sample's constraint and its mask that comes next, and who makes masks while the device runs.

A token that was read makes the next mask due: its maker tells the constraint the token and asks it for the mask. Until
that is there `words` is None, and who needs it goes on without the row. Where tokens are forced the constraint is run
ahead of them, and they need neither a draw nor a mask each. It knows constraints and words; no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from typing import Protocol, cast

from penstock.schedule.constraint import Constraint
from penstock.schedule.step import Int32


@dataclass(slots=True, eq=False)
class Guide:
    """What one sample is held to, whatever rows it has. any_token: the mask [words] where its constraint says None."""

    constraint: object  # as its maker knows it
    any_token: Int32
    allowed: Int32 | None = None  # its request's allowed_token_ids as a mask; None: all may come
    words: Int32 | None = None  # its mask, where that is known
    begun: bool = False  # whether a mask is there, or being made
    over: bool = False  # its sample has ended: nothing is asked of the constraint any more
    certain: list[int] = field(default_factory=list)  # forced, and accepted already: the mask is the one behind them
    drawn: int = 0  # of them, those that a launched draw says
    read: int = 0  # of them, those that were read

    def begin(self) -> None:
        """Takes in that its next mask is being made."""
        self.words, self.begun = None, True
        self.certain, self.drawn, self.read = [], 0, 0

    def made(self, certain: list[int], words: Int32 | None) -> None:
        """Takes the mask in, and the forced tokens that it stands behind."""
        if self.allowed is not None:
            words = self.allowed if words is None else self.allowed & words
        self.certain = certain
        self.words = self.any_token if words is None else words

    def coming(self, most: int) -> list[int]:
        """Returns forced tokens that no launched draw says yet."""
        return self.certain[self.drawn : self.drawn + most] if self.words is not None else []

    def say(self, most: int) -> list[int]:
        """Returns them too; a draw is launched that says them."""
        tokens = self.coming(most)
        self.drawn += len(tokens)
        return tokens

    def knows(self) -> bool:
        """Takes in that a token was read -> whether it was a forced one."""
        known = self.read < len(self.certain)
        self.read += known
        return known


class MaskMakers(Protocol):
    """Makes the masks of one scheduler's guides, beside it. For one thread."""

    def start(self, guides: Sequence[Guide], tokens: Sequence[int] | None = None) -> None:
        """Makes each guide's next mask: behind tokens[i], or as it stands. None of theirs is being made."""

    def wait(self, seconds: float) -> int:
        """Waits until all masks are there, so long at most -> how many are not. Raises what a constraint raised."""

    def end(self, guides: Sequence[Guide]) -> None:
        """Lets go of guides whose samples have ended; of some a mask may be under way."""


class MasksHere:
    """Makes masks in this process, of objects that are Constraints: where `start` is called, or in an executor."""

    def __init__(self, executor: Executor | None = None) -> None:
        self._executor = executor
        self._under_way: set[Future[None]] = set()

    def start(self, guides: Sequence[Guide], tokens: Sequence[int] | None = None) -> None:
        for at, guide in enumerate(guides):
            guide.begin()
            token = None if tokens is None else tokens[at]
            if self._executor is None:
                _make(guide, token)
            else:
                self._under_way.add(self._executor.submit(_make, guide, token))

    def wait(self, seconds: float) -> int:
        done, self._under_way = wait(self._under_way, seconds)
        for work in done:
            work.result()
        return len(self._under_way)

    def end(self, guides: Sequence[Guide]) -> None:
        """Nothing is held for them here."""


def _make(guide: Guide, token: int | None) -> None:
    constraint = cast(Constraint, guide.constraint)
    if token is not None:
        constraint.accept(token)
    certain = constraint.forced()
    for each in certain:
        constraint.accept(each)
    guide.made(certain, constraint.mask())
