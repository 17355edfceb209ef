"""MaskBoard: token masks in shared memory. A sample with a grammar has one index in the board's
arrays, its place. The memory is shared by the scheduler and the process that makes the masks.

    the scheduler   adds 1 to begun[p] for each new sample, before it sends the sample to the maker;
                    writes token[p], then adds 1 to asked[p]
    the maker       writes certain[p], count[p], words[p], then sets made[p] = asked[p]

No message is sent for a mask: a thousand messages a step took the host longer than the device's
whole step. Each number has one writer, and `fence` orders the writes. Where the grammar forces the
next tokens, the maker runs ahead: it hands over the forced tokens and the mask behind them, so
forced tokens need no draw and no mask. Knows places and words; no samples.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
FORCED = 32  # most forced tokens ahead of a mask
AS_IT_STANDS = -1  # stands for a token: asks for a sample's first mask
_LOCK = threading.Lock()


def fence() -> None:
    """Orders the reads and writes before it ahead of those after it, on processors that may reorder
    them: releasing and then taking a lock does so."""
    for _ in range(2):
        with _LOCK:
            pass


@dataclass(slots=True, eq=False)
class MaskBoard:
    """Columns of int32, one entry a place."""

    words: Int32  # [places, words]  bit t % 32 of word t // 32 set: token t is allowed
    certain: Int32  # [places, FORCED]  forced tokens that come before the mask
    asked: Int32  # [places]  number of the mask that was asked for last
    made: Int32  # [places]  number of the mask that is there
    token: Int32  # [places]  token behind which the wanted mask stands
    count: Int32  # [places]  number of forced tokens
    # [places]  samples that had the place so far: a maker that has counted fewer has yet to hear of
    # the latest one
    begun: Int32

    @classmethod
    def over(cls, memory: Int32, places: int, words: int) -> MaskBoard:
        """Lays the columns over a zeroed memory of `size` int32."""
        ends = np.cumsum([places * words, places * FORCED, *[places] * 5]).tolist()
        parts = [memory[first:last] for first, last in zip([0, *ends], ends, strict=False)]
        return cls(parts[0].reshape(places, words), parts[1].reshape(places, FORCED), *parts[2:])

    @staticmethod
    def size(places: int, words: int) -> int:
        return places * (words + FORCED + 5)

    def ready(self, places: Int32) -> NDArray[np.bool_]:
        """Returns a boolean for each place: the mask that was asked for is there."""
        there: NDArray[np.bool_] = self.made.take(places) == self.asked.take(places)
        fence()
        return there

    def missing(self) -> int:
        """Returns the number of masks that are wanted and not there yet."""
        return int(np.count_nonzero(self.made != self.asked))

    def ask(self, places: Int32, tokens: Int32) -> None:
        self.token[places] = tokens
        fence()
        self.asked[places] += 1

    def put(self, place: int, ticket: int, certain: list[int], words: Int32 | None) -> None:
        """Publishes mask number `ticket` of a place. words: the mask, not copied if it already lies
        in its place; None allows every token."""
        if words is None or words.base is not self.words.base:
            self.words[place] = -1 if words is None else words
        self.certain[place, : len(certain)] = certain
        self.count[place] = len(certain)
        fence()
        self.made[place] = ticket
