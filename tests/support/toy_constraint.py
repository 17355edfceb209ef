"""A toy grammar for constrained samples: any token first, then one of the other parity than the last. It counts what it
is told, so that a token that is accepted twice, late or never shows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from penstock.schedule.step import Int32


class Alternating:
    """Serves as schedule.constraint.Constraint. ends: ids that may come at any place."""

    def __init__(self, vocabulary: int, ends: tuple[int, ...] = ()) -> None:
        self.vocabulary, self.ends = vocabulary, ends
        self.tokens: list[int] = []

    def mask(self) -> Int32 | None:
        if not self.tokens:
            return None
        bits = np.zeros(-(-self.vocabulary // 32) * 32, np.bool_)
        bits[1 - self.tokens[-1] % 2 : self.vocabulary : 2] = True
        bits[list(self.ends)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> None:
        assert not self.tokens or token in self.ends or (token + self.tokens[-1]) % 2, "a token that may not come"
        self.tokens.append(token)

    def rollback(self, tokens: int) -> None:
        del self.tokens[len(self.tokens) - tokens :]


def holds(tokens: list[int], ends: tuple[int, ...] = ()) -> bool:
    """Whether an output is the grammar's."""
    return all((a + b) % 2 or b in ends for a, b in pairwise(tokens))
