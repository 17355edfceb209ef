"""MaskBoard: the masks that samples wait for, by place, in memory that the scheduler and who makes
them share.

    the scheduler   begun[p] one more with each sample, before the maker is told of it; token[p],
    then asked[p] one more
    the maker       certain[p], count[p], words[p], then made[p] = asked[p]

No word goes to and fro for a mask: a thousand of them a step, each read and told of by itself, took
the host longer than the device's whole step. Each number has one writer, and `fence` keeps them in
their order. Where tokens are forced the constraint is run ahead of them: the mask stands behind
them, and they need neither a draw nor a mask each. It knows places and words; no samples.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
FORCED = 32  # tokens ahead of a mask, at most
AS_IT_STANDS = -1  # in the place of a token: a sample's first mask
_LOCK = threading.Lock()


def fence() -> None:
    """Keeps reads and writes before it before those behind it, where a processor does not by
    itself: a lock that is let go, then taken, orders them."""
    for _ in range(2):
        with _LOCK:
            pass


@dataclass(slots=True, eq=False)
class MaskBoard:
    """Columns by place."""

    words: Int32  # [places, words]  bit t % 32 of word t // 32 set: token t may come
    certain: Int32  # [places, FORCED]  tokens that come first
    asked: Int32  # [places]  number of the mask that is wanted
    made: Int32  # [places]  of the one that is there
    token: Int32  # [places]  behind which the wanted one is
    count: Int32  # [places]  how many are certain
    # [places]  samples that had the place so far: who was told of fewer has yet to hear of the last
    # one
    begun: Int32

    @classmethod
    def over(cls, memory: Int32, places: int, words: int) -> MaskBoard:
        """Lays the columns over memory of `size` int32 that is 0."""
        ends = np.cumsum([places * words, places * FORCED, *[places] * 5]).tolist()
        parts = [memory[first:last] for first, last in zip([0, *ends], ends, strict=False)]
        return cls(parts[0].reshape(places, words), parts[1].reshape(places, FORCED), *parts[2:])

    @staticmethod
    def size(places: int, words: int) -> int:
        return places * (words + FORCED + 5)

    def ready(self, places: Int32) -> NDArray[np.bool_]:
        """Returns whether each place's mask is there."""
        there: NDArray[np.bool_] = self.made.take(places) == self.asked.take(places)
        fence()
        return there

    def missing(self) -> int:
        """Returns how many masks are wanted and not there."""
        return int(np.count_nonzero(self.made != self.asked))

    def ask(self, places: Int32, tokens: Int32) -> None:
        self.token[places] = tokens
        fence()
        self.asked[places] += 1

    def put(self, place: int, ticket: int, certain: list[int], words: Int32 | None) -> None:
        """The mask number `ticket` of a place is there: words, unless they lie in their place
        already; None: any token."""
        if words is None or words.base is not self.words.base:
            self.words[place] = -1 if words is None else words
        self.certain[place, : len(certain)] = certain
        self.count[place] = len(certain)
        fence()
        self.made[place] = ticket
