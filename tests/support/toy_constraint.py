"""A toy grammar for constrained samples: any token first, then one of the other parity than the
last. It counts what it is told, so that a token that is accepted twice, late or never shows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from penstock.schedule.step import Int32


class Alternating:
    """Serves as schedule.constraint.Constraint. ends: ids that may come at any place, but where
    tokens are forced."""

    def __init__(
        self, vocabulary: int, ends: tuple[int, ...] = (), *, forces: bool = False
    ) -> None:
        self.vocabulary, self.ends, self.forces = vocabulary, ends, forces
        self.tokens: list[int] = []

    def mask(self) -> Int32 | None:
        if not self.tokens:
            return None
        bits = np.zeros(-(-self.vocabulary // 32) * 32, np.bool_)
        if forced := self.forced():
            bits[forced[0]] = True
            return np.packbits(bits, bitorder="little").view(np.int32)
        bits[1 - self.tokens[-1] % 2 : self.vocabulary : 2] = True
        bits[list(self.ends)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)

    def forced(self) -> list[int]:
        """Behind a multiple of 5 the next numbers come, up to 6 of them."""
        left = 0
        for token in self.tokens:
            left = left - 1 if left else token % 7 if token % 5 == 0 else 0
        return (
            [(self.tokens[-1] + 1 + i) % self.vocabulary for i in range(left)]
            if self.tokens and self.forces
            else []
        )

    def accept(self, token: int) -> None:
        assert not self.tokens or token in self.ends or (token + self.tokens[-1]) % 2, (
            "a token that may not come"
        )
        self.tokens.append(token)

    def rollback(self, tokens: int) -> None:
        del self.tokens[len(self.tokens) - tokens :]


def holds(tokens: list[int], ends: tuple[int, ...] = ()) -> bool:
    """Whether an output is the grammar's."""
    return all((a + b) % 2 or b in ends for a, b in pairwise(tokens))
