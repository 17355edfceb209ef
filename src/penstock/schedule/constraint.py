"""Constraint: the allowed next tokens of one sample. A grammar computes them; the scheduler sees
only token ids and bit masks.

A row's mask depends on its last token, so a row with a constraint is drawn only after all its
earlier tokens have been read. Its step draws late: the forward is launched first, the draw once the
masks are ready (step.py). A preempted row keeps its constraint. A mask maker
(mask_makers.MaskMakers) may keep constraints in another process; then the scheduler holds only
stand-in objects. In a request with constraints min_tokens does not forbid end ids: where the
grammar allows only the end, no token would be left. Knows no text, no rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.schedule.step import Int32


class Constraint(Protocol):
    """A grammar's state for one sample. Once the text is complete, the mask allows only
    end-of-sequence ids."""

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


# function: sample index within its request -> its constraint or stand-in; returns None if the
# sample has none
ConstraintFactory = Callable[[int], object | None]
