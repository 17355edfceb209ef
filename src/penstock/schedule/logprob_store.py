"""LogprobStore: logprobs of drawn tokens that wait to go up with their tokens, in the pool's geometry, as slot_token.

Kept from the first request on that asks for logprobs; the most likely ones as wide as the widest such request. A slot
means something only to the row that drew its token: blocks that rows share hold no token with scores to be sent (see
admission._start). It knows slots; no rows and no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.config import BLOCK_SIZE
from penstock.schedule.step import Float32, Int32, Int64, TokenLogprobs

NO_SCORES = -1  # in Rows.top: the row asks for no logprobs


@dataclass(slots=True)
class TokenScores:
    """Scores of t tokens that follow each other; `top_*` are padded with id -1."""

    chosen: Float32  # [t]
    rank: Int32  # [t]
    top_ids: Int32  # [t, k]
    top: Float32  # [t, k]


class LogprobStore:
    """A store of scores for a pool of `num_blocks` blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.kept = False  # somebody has asked: the arrays are there
        self._shape(0, 0)

    def _shape(self, blocks: int, width: int) -> None:
        # Zeros are pages that the system gives once they are written to: a wide store costs what is used of it.
        self.chosen: Float32 = np.zeros((blocks, BLOCK_SIZE), np.float32)
        self.rank: Int32 = np.zeros((blocks, BLOCK_SIZE), np.int32)
        self._widen(blocks, width)

    def _widen(self, blocks: int, width: int) -> None:
        self.top_ids: Int32 = np.zeros((blocks, BLOCK_SIZE, width), np.int32)
        self.top: Float32 = np.zeros((blocks, BLOCK_SIZE, width), np.float32)

    def ask(self, k: int) -> None:
        """A request with `k` most likely tokens comes (0: the chosen one's alone; NO_SCORES: none)."""
        if k == NO_SCORES:
            return
        if not self.kept:
            self.kept = True
            self._shape(self.num_blocks, k)
        elif k > self.top.shape[2]:
            written = np.flatnonzero(self.rank.any(axis=1))  # ranks count from 1
            old, ids, values = self.top.shape[2], self.top_ids, self.top
            self._widen(self.num_blocks, k)
            self.top_ids[written, :, :old], self.top[written, :, :old] = ids[written], values[written]

    def put(self, slots: Int64, found: TokenScores | TokenLogprobs) -> None:
        """Writes scores of drawn tokens to their slots; a slot below 0 takes none. Wider ones than anybody asked for
        are cut."""
        taken = slots >= 0
        if not taken.all():
            slots = slots[taken]
            found = TokenScores(found.chosen[taken], found.rank[taken], found.top_ids[taken], found.top[taken])
        self.chosen.reshape(-1)[slots] = found.chosen
        self.rank.reshape(-1)[slots] = found.rank
        width = min(self.top.shape[2], found.top.shape[1])
        if width:
            self.top_ids.reshape(-1, self.top.shape[2])[slots, :width] = found.top_ids[:, :width]
            self.top.reshape(-1, self.top.shape[2])[slots, :width] = found.top[:, :width]

    def blank(self, slots: Int64) -> None:
        """Tokens that could not be drawn have no score."""
        if self.kept:
            self.chosen.reshape(-1)[slots] = np.nan

    def take(self, slots: Int64, tops: Int32) -> TokenScores:
        """Returns scores from slots [t]. tops [t]: how many of the most likely ones each token's row asked for, or
        NO_SCORES: such a token's are NaN."""
        width, stored = int(tops.max(initial=0)), self.top.shape[2]
        found = TokenScores(
            self.chosen.reshape(-1).take(slots),
            self.rank.reshape(-1).take(slots),
            self.top_ids.reshape(-1, stored)[slots, :width] if width else np.zeros((tops.size, 0), np.int32),
            self.top.reshape(-1, stored)[slots, :width] if width else np.zeros((tops.size, 0), np.float32),
        )
        if tops.size and tops.min() < width:
            none = np.arange(width) >= tops[:, None]
            found.top_ids[none], found.top[none] = -1, np.nan
            found.chosen[tops == NO_SCORES] = np.nan
        return found
