"""Deltas: what one step sends up, as columns: one message a step, not one a sequence. It crosses the channel as is.

It knows ids and numbers only; the client makes text of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.step import Float32, Int32, Int64

GOES_ON = -1  # in `finish`; else an index into request.FINISH_REASONS
STOP, LENGTH, ABORT, ERROR = range(4)
NO_STOP_ID = -1  # in `stop_id`: it ended by an end-of-sequence id, by its limit, or goes on


@dataclass(slots=True)
class Deltas:
    """k samples' news. `tokens` and the logprob columns are CSRs over the samples by `start`."""

    request: Int64  # [k] request ids
    sample: Int32  # [k]
    finish: NDArray[np.int8]  # [k] GOES_ON, or why it ended
    stop_id: Int32  # [k] the stop_token_ids entry that ended it, or NO_STOP_ID
    start: Int32  # [k + 1]
    tokens: Int32  # [sum]
    chosen: Float32 | None = None  # [sum] logprob of each token, NaN where its request asked for none
    rank: Int32 | None = None  # [sum]
    top_ids: Int32 | None = None  # [sum, j] -1: none
    top: Float32 | None = None  # [sum, j]
    prompts: list[PromptNews] = field(default_factory=list)

    @property
    def count(self) -> int:
        return int(self.request.size)


@dataclass(slots=True)
class PromptNews:
    """Sent once a request, before its first tokens: what was cached, and the prompt's logprobs where asked for."""

    request: int
    cached_tokens: int
    chosen: Float32 | None = None  # [prompt - 1]: of prompt tokens 1, 2, ...
    rank: Int32 | None = None
    top_ids: Int32 | None = None  # [prompt - 1, k]
    top: Float32 | None = None


def empty_deltas() -> Deltas:
    none = np.zeros(0, np.int32)
    return Deltas(np.zeros(0, np.int64), none, np.zeros(0, np.int8), none, np.zeros(1, np.int32), none)
