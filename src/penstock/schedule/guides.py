"""Guides: a sample's constraint and its mask that comes next, and the threads that make masks while the device runs.

A token that was read makes the next mask due: a thread tells the constraint the token and asks it for the mask. Until
that is there `words` is None, and who needs it goes on without the row. Where tokens are forced the constraint is run
ahead of them, and they need neither a draw nor a mask each. It knows constraints and words; no rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from penstock.schedule.constraint import Constraint
from penstock.schedule.step import Int32

THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
_TOGETHER = 8  # masks that a thread makes without asking for more: handing one over costs half of what it takes


@dataclass(slots=True, eq=False)
class Guide:
    """What one sample is held to, whatever rows it has. any_token: the mask [words] where its constraint says None."""

    constraint: Constraint
    any_token: Int32
    allowed: Int32 | None = None  # its request's allowed_token_ids as a mask; None: all may come
    words: Int32 | None = None  # its mask, where that is known
    begun: bool = False  # whether a mask is there, or being made
    certain: list[int] = field(default_factory=list)  # forced, and accepted already: the mask is the one behind them
    drawn: int = 0  # of them, those that a launched draw says
    read: int = 0  # of them, those that were read

    def coming(self, most: int) -> list[int]:
        """Returns forced tokens that no launched draw says yet."""
        there = self.words is not None  # the last that a thread writes
        return self.certain[self.drawn : self.drawn + most] if there else []

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


class MaskMakers:
    """Threads for masks. They are started when the first mask is due."""

    def __init__(self, threads: Executor | None = None) -> None:
        """threads: others than its own; for tests."""
        self._threads = threads
        self._under_way: set[Future[None]] = set()

    def start(self, guides: Sequence[Guide], tokens: Sequence[int] | None = None) -> None:
        """Makes each guide's next mask: behind tokens[i], or as it stands. None of theirs is being made."""
        for guide in guides:
            guide.words, guide.begun = None, True
            guide.certain, guide.drawn, guide.read = [], 0, 0
        if guides and self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "penstock-masks")
        for first in range(0, len(guides), _TOGETHER):
            part = slice(first, first + _TOGETHER)
            assert self._threads is not None
            self._under_way.add(self._threads.submit(_make, guides[part], tokens and tokens[part]))

    def wait(self, seconds: float) -> None:
        """Waits until all masks are there, so long at most. Raises what a constraint raised."""
        done, self._under_way = wait(self._under_way, seconds)
        for work in done:
            work.result()


def _make(guides: Sequence[Guide], tokens: Sequence[int] | None) -> None:
    for at, guide in enumerate(guides):
        if tokens is not None:
            guide.constraint.accept(tokens[at])
        guide.certain = guide.constraint.forced()
        for token in guide.certain:
            guide.constraint.accept(token)
        words = guide.constraint.mask()
        if guide.allowed is not None:
            words = guide.allowed if words is None else guide.allowed & words
        guide.words = guide.any_token if words is None else words
