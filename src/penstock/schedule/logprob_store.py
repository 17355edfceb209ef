"""LogprobStore: logprobs of drawn tokens that wait to go up with their tokens, in the pool's geometry, as slot_token.

Kept from the first request on that asks for logprobs; the most likely ones as wide as the widest such request. A slot
means something only to the row that drew its token: blocks that rows share hold no token with scores to be sent (see
admission._start). It knows slots; no rows and no requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.step import Bool, Float32, Int32, Int64, TokenLogprobs

T = TypeVar("T", bound=np.generic)
NO_SCORES = -1  # in Rows.top: the row asks for no logprobs


@dataclass(slots=True)
class TokenScores:
    """LogprobStore of t tokens that follow each other; `top_*` are padded with id -1."""

    chosen: Float32  # [t]
    rank: Int32  # [t]
    top_ids: Int32  # [t, k]
    top: Float32  # [t, k]


@dataclass(slots=True)
class Places:
    """Where tokens that go up lie: their slots one by one, or whole blocks and which of their slots are meant."""

    slots: Int64 | None = None  # [t] flat
    blocks: Int32 | None = None  # [b]
    mine: Bool | None = None  # [b, 16]

    def of(self, store: NDArray[T]) -> NDArray[T]:
        """[t, ...] of a store [blocks, 16, ...]."""
        if self.slots is not None:
            return store.reshape(store.shape[0] * 16, *store.shape[2:]).take(self.slots, axis=0)
        assert self.blocks is not None and self.mine is not None
        found: NDArray[T] = store.take(self.blocks, axis=0)[self.mine]
        return found


class LogprobStore:
    """A store of scores for a pool of `num_blocks` blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.kept = False  # somebody has asked: the arrays are there
        self._shape(0, 0)

    def _shape(self, blocks: int, width: int) -> None:
        # Zeros are pages that the system gives once they are written to: a wide store costs what is used of it.
        self.chosen: Float32 = np.zeros((blocks, 16), np.float32)
        self.rank: Int32 = np.zeros((blocks, 16), np.int32)
        self._widen(blocks, width)

    def _widen(self, blocks: int, width: int) -> None:
        self.top_ids: Int32 = np.zeros((blocks, 16, width), np.int32)
        self.top: Float32 = np.zeros((blocks, 16, width), np.float32)

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
        """LogprobStore of drawn tokens, to their slots. Wider ones than anybody asked for are cut."""
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

    def take(self, places: Places, tops: Int32) -> TokenScores:
        """LogprobStore from their places; tops [t]: how many of the most likely ones each token's row asked for."""
        width = int(tops.max(initial=0))
        chosen, rank = places.of(self.chosen), places.of(self.rank)
        if not width:
            return TokenScores(chosen, rank, np.zeros((tops.size, 0), np.int32), np.zeros((tops.size, 0), np.float32))
        found = TokenScores(chosen, rank, places.of(self.top_ids)[:, :width], places.of(self.top)[:, :width])
        if (tops < width).any():
            none = np.arange(width) >= tops[:, None]
            found.top_ids[none], found.top[none] = -1, np.nan
        return found
