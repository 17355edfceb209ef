"""LogprobStore: logprobs of drawn tokens that wait to go up with their tokens, in the pool's
geometry, as slot_token.

Kept from the first request on that asks for logprobs. A slot means something only to the row that
drew its token: no block that rows share holds a token with scores to be sent (see
admission._start). It knows slots; no rows and no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.config import BLOCK_SIZE
from penstock.request import MAX_LOGPROBS
from penstock.schedule.step import Float32, Int32, Int64, TokenLogprobs

NO_SCORES = -1  # in Rows.top: the row asks for no logprobs


@dataclass(slots=True)
class TokenScores:
    """Scores of t tokens that follow each other; `top_*` are padded with id -1."""

    chosen: Float32  # [t]
    rank: Int32  # [t]
    top_ids: Int32  # [t, k]
    top: Float32  # [t, k]


def no_scores(k: int) -> TokenScores:
    """Returns those of no tokens, with the k most likely."""
    none = np.zeros(0, np.float32)
    return TokenScores(
        none, np.zeros(0, np.int32), np.zeros((0, k), np.int32), np.zeros((0, k), np.float32)
    )


class LogprobStore:
    """A store of scores for a pool of `num_blocks` blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.kept = False  # somebody has asked: the arrays are there

    def ask(self, k: int) -> None:
        """A request with `k` most likely tokens comes (0: the chosen one's alone; NO_SCORES:
        none)."""
        if self.kept or k == NO_SCORES:
            return
        # Zeros are pages that the system gives once they are written to: the store costs what is
        # used of it.
        self.kept, slots = True, self.num_blocks * BLOCK_SIZE
        self.chosen: Float32 = np.zeros(slots, np.float32)
        self.rank: Int32 = np.zeros(slots, np.int32)
        self.top_ids: Int32 = np.zeros((slots, MAX_LOGPROBS), np.int32)
        self.top: Float32 = np.zeros((slots, MAX_LOGPROBS), np.float32)

    def put(self, slots: Int64, found: TokenScores | TokenLogprobs) -> None:
        """Writes scores of drawn tokens to their slots; a slot below 0 takes none. Wider ones than
        anybody may ask for are cut."""
        taken = slots >= 0
        if not taken.all():
            slots = slots[taken]
            found = TokenScores(
                found.chosen[taken], found.rank[taken], found.top_ids[taken], found.top[taken]
            )
        self.chosen[slots], self.rank[slots] = found.chosen, found.rank
        width = min(MAX_LOGPROBS, found.top.shape[1])
        self.top_ids[slots, :width], self.top[slots, :width] = (
            found.top_ids[:, :width],
            found.top[:, :width],
        )

    def blank(self, slots: Int64) -> None:
        """Tokens that could not be drawn have no score."""
        if self.kept:
            self.chosen[slots] = np.nan

    def take(self, slots: Int64, tops: Int32) -> TokenScores:
        """Returns scores from slots [t]. tops [t]: how many of the most likely ones each token's
        row asked for, or NO_SCORES: such a token's are NaN."""
        width = int(tops.max(initial=0))
        found = TokenScores(
            self.chosen[slots],
            self.rank[slots],
            self.top_ids[slots, :width],
            self.top[slots, :width],
        )
        if tops.size and tops.min() < width:
            none = np.arange(width) >= tops[:, None]
            found.top_ids[none], found.top[none] = -1, np.nan
            found.chosen[tops == NO_SCORES] = np.nan
        return found
