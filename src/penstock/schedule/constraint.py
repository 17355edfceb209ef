"""Constraint: what may come next in one sample, said by somebody who knows a grammar; the scheduler
sees numbers.

A row with a constraint is drawn only when all of its tokens have been read, since its mask needs
the last one: its step draws late. It keeps its constraint through preemption. Who makes masks
(mask_makers.MaskMakers) may keep constraints in another process, where the scheduler knows them by
what stands for them. In a request with constraints min_tokens is their own affair: to bar a row's
ends where a grammar leaves nothing else would leave no token. It knows no text, no rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.schedule.step import Int32


class Constraint(Protocol):
    """The state of one sample. Once only its end may follow, the mask names end ids alone."""

    def mask(self) -> Int32 | None:
        """Returns the words of a token mask [ceil(vocabulary / 32)]: bit t % 32 of word t // 32
        set: token t may come. None: any token may. It is not written to any more. A mask of no
        token ends the sample with an error."""

    def forced(self) -> list[int]:
        """Returns the tokens that come next whatever is drawn, mostly none; mask() names the first
        of them alone."""

    def accept(self, token: int) -> None:
        """Takes the next token of the sample in; the sample goes on behind it."""

    def rollback(self, tokens: int) -> None:
        """Takes so many of the last accepted tokens back."""


# Sample index within its request -> its constraint, or what stands for it; None: it has none.
ConstraintFactory = Callable[[int], object | None]
