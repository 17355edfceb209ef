"""Constraint: which tokens may come next in one sample, as computed by a grammar; the scheduler
sees only numbers.

A row with a constraint is drawn only after all its tokens have been read, since its mask depends on
the last one: its step draws late. It keeps its constraint through preemption. A mask maker
(mask_makers.MaskMakers) may keep constraints in another process; then the scheduler holds
stand-ins. In a request with constraints min_tokens does not bar end ids: where a grammar allows
only the end, that would leave no token. Knows no text, no rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.schedule.step import Int32


class Constraint(Protocol):
    """State of one sample. Once only the end may follow, its mask allows end ids alone."""

    def mask(self) -> Int32 | None:
        """Returns the words of a token mask, int32 [ceil(vocabulary / 32)]: bit t % 32 of word t //
        32 set: token t is allowed. None: any token is allowed. The caller owns the array. An empty
        mask ends the sample with an error."""

    def forced(self) -> list[int]:
        """Returns the tokens that must come next (mostly none); mask() allows only the first of
        them."""

    def accept(self, token: int) -> None:
        """Advances the constraint by the sample's next token."""

    def rollback(self, tokens: int) -> None:
        """Undoes the last `tokens` accepted tokens."""


# sample index within its request -> its constraint or stand-in; None: the sample has none
ConstraintFactory = Callable[[int], object | None]
