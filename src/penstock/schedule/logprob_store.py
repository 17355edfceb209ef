"""LogprobStore: stores logprobs until their tokens are sent. It has one entry per token slot of the
block pool, like slot_token.

Allocated at the first request for logprobs. A slot's logprobs (scores) belong to the row that drew
its token: no shared block holds a token whose scores have not been sent yet (see
admission._may_share). Knows slots; no rows and no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.config import BLOCK_SIZE
from penstock.request import MAX_LOGPROBS
from penstock.schedule.step import Float32, Int32, Int64, TokenLogprobs

NO_SCORES = -1  # value in Rows.top: the row wants no logprobs


@dataclass(slots=True)
class TokenScores:
    """Logprobs of t consecutive tokens, with up to k most likely tokens each; `top_ids` is padded
    with -1."""

    chosen: Float32  # [t] logprob of the sample's token
    rank: Int32  # [t] rank of the sample's token, from 1
    top_ids: Int32  # [t, k] ids of the most likely tokens
    top: Float32  # [t, k] logprobs of the most likely tokens


def no_scores(k: int) -> TokenScores:
    """Returns TokenScores of zero tokens, with k columns for the most likely."""
    none = np.zeros(0, np.float32)
    return TokenScores(
        none, np.zeros(0, np.int32), np.zeros((0, k), np.int32), np.zeros((0, k), np.float32)
    )


class LogprobStore:
    """Logprobs of every token slot of a pool of `num_blocks` blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.kept = False  # True once a request has wanted logprobs: the arrays exist

    def ask(self, k: int) -> None:
        """Allocates the arrays if a request needs them. k: number of most likely tokens it wants
        (0: only the chosen token's logprob; NO_SCORES: no logprobs)."""
        if self.kept or k == NO_SCORES:
            return
        # np.zeros takes memory pages only when written: the store costs only the part in use.
        self.kept, slots = True, self.num_blocks * BLOCK_SIZE
        self.chosen: Float32 = np.zeros(slots, np.float32)
        self.rank: Int32 = np.zeros(slots, np.int32)
        self.top_ids: Int32 = np.zeros((slots, MAX_LOGPROBS), np.int32)
        self.top: Float32 = np.zeros((slots, MAX_LOGPROBS), np.float32)

    def put(self, slots: Int64, found: TokenScores | TokenLogprobs) -> None:
        """Writes scores of drawn tokens to their slots; slots below 0 are skipped. Columns beyond
        MAX_LOGPROBS are dropped."""
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
        """Clears the scores of tokens that could not be drawn."""
        if self.kept:
            self.chosen[slots] = np.nan

    def take(self, slots: Int64, tops: Int32) -> TokenScores:
        """Returns the scores at slots [t]. tops [t]: number of most likely tokens wanted by each
        token's row, or NO_SCORES: then its scores are NaN."""
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
