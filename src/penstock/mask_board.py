"""MaskBoard: token masks in shared memory. A sample with a grammar has one index in the board's
arrays, its place. The memory is shared by the scheduler and the process that makes the masks.

    the scheduler   adds 1 to begun[p] for each new sample, before it sends the sample to the maker;
                    writes token[p], then adds 1 to asked[p]
    the maker       writes certain[p], count[p], words[p], then sets made[p] = asked[p]

No message is sent for a mask: sending a thousand messages a step took the host longer than the
device's whole step. Each number has one writer, and `fence` orders the writes. Where the grammar
forces the next tokens, the maker writes these tokens and the mask after them, so forced tokens need
no draw and no mask of their own. Knows places and mask words; no samples.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
FORCED = 32  # most forced tokens before a mask
AS_IT_STANDS = -1  # value in `token`: requests the mask before any token
_LOCK = threading.Lock()


def fence() -> None:
    """Orders the reads and writes before it ahead of those after it, on processors that may reorder
    them: releasing and then taking a lock does so."""
    for _ in range(2):
        with _LOCK:
            pass


@dataclass(slots=True, eq=False)
class MaskBoard:
    """Arrays of int32 with an entry for each place, the index of a sample."""

    words: Int32  # [places, words]  bit t % 32 of word t // 32 set: token t is allowed
    certain: Int32  # [places, FORCED]  forced tokens that come before the mask
    asked: Int32  # [places] number of the mask requested last
    made: Int32  # [places] number of the mask that `words` holds
    token: Int32  # [places] the token after which the requested mask applies
    count: Int32  # [places] number of forced tokens in `certain`
    # [places] number of samples that have had the place; a maker that knows of fewer has not
    # received the latest sample yet
    begun: Int32

    @classmethod
    def over(cls, memory: Int32, places: int, words: int) -> MaskBoard:
        """Returns a board whose arrays lie in a zeroed memory of `size` int32."""
        ends = np.cumsum([places * words, places * FORCED, *[places] * 5]).tolist()
        parts = [memory[first:last] for first, last in zip([0, *ends], ends, strict=False)]
        return cls(parts[0].reshape(places, words), parts[1].reshape(places, FORCED), *parts[2:])

    @staticmethod
    def size(places: int, words: int) -> int:
        return places * (words + FORCED + 5)

    def ready(self, places: Int32) -> NDArray[np.bool_]:
        """Returns, for each of these places, True if the mask requested last is ready."""
        there: NDArray[np.bool_] = self.made.take(places) == self.asked.take(places)
        fence()
        return there

    def missing(self) -> int:
        """Returns the number of requested masks that are not ready yet."""
        return int(np.count_nonzero(self.made != self.asked))

    def ask(self, places: Int32, tokens: Int32) -> None:
        self.token[places] = tokens
        fence()
        self.asked[places] += 1

    def put(self, place: int, ticket: int, certain: list[int], words: Int32 | None) -> None:
        """Publishes mask number `ticket` of a place, with the forced tokens before it (`certain`).
        words: the mask, not copied if it already lies in the board; None allows every token."""
        if words is None or words.base is not self.words.base:
            self.words[place] = -1 if words is None else words
        self.certain[place, : len(certain)] = certain
        self.count[place] = len(certain)
        fence()
        self.made[place] = ticket
