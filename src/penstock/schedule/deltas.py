"""Deltas: what one step sends up, as columns: one message a step, not one a sequence. It crosses
the channel as is.

It knows ids and numbers only; the client makes text of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.step import Float32, Int32, Int64

GOES_ON = -1  # in `finish`; else an index into request.FINISH_REASONS
STOP, LENGTH, ABORT, ERROR = range(4)
SAMPLE_WEIGHT = 64  # tokens of a long sample that cost a reader as much as a sample of one
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
    chosen: Float32 | None = (
        None  # [sum] logprob of each token, NaN where its request asked for none
    )
    rank: Int32 | None = None  # [sum]
    top_ids: Int32 | None = None  # [sum, j] -1: none
    top: Float32 | None = None  # [sum, j]
    prompts: list[PromptNews] = field(default_factory=list)

    @property
    def count(self) -> int:
        return int(self.request.size)

    def in_parts(self, most: int) -> Iterator[Deltas]:
        """The same news in messages of about `most` tokens at most, for a reader that has others to
        look after: a step in which thousands of whole samples end brings millions. A sample counts
        as SAMPLE_WEIGHT tokens more than it has, and is not cut."""
        weight = self.start.astype(np.int64) + SAMPLE_WEIGHT * np.arange(self.count + 1)
        total = int(weight[-1])
        if total <= most:
            yield self
            return
        cuts = np.searchsorted(weight, np.arange(most, total, most))
        for low, high in pairwise(np.unique([0, *cuts, self.count]).tolist()):
            yield self.part(np.arange(low, high), self.prompts if low == 0 else [])

    def part(self, samples: Int64, prompts: list[PromptNews]) -> Deltas:
        """Returns the news of some samples, indices [k] into the columns, beside `prompts`."""
        counts = np.diff(self.start)[samples]
        start = np.zeros(samples.size + 1, np.int32)
        np.cumsum(counts, out=start[1:])
        places = np.repeat(self.start[samples] - start[:-1], counts) + np.arange(
            start[-1], dtype=np.int32
        )
        return Deltas(
            request=self.request[samples],
            sample=self.sample[samples],
            finish=self.finish[samples],
            stop_id=self.stop_id[samples],
            start=start,
            tokens=self.tokens[places],
            chosen=None if self.chosen is None else self.chosen[places],
            rank=None if self.rank is None else self.rank[places],
            top_ids=None if self.top_ids is None else self.top_ids[places],
            top=None if self.top is None else self.top[places],
            prompts=prompts,
        )


@dataclass(slots=True)
class PromptNews:
    """Sent once a request, before its first tokens: what was cached, and the prompt's logprobs
    where asked for."""

    request: int
    cached_tokens: int
    chosen: Float32 | None = None  # [prompt - 1]: of prompt tokens 1, 2, ...
    rank: Int32 | None = None
    top_ids: Int32 | None = None  # [prompt - 1, k]
    top: Float32 | None = None
    waited: float = 0.0  # seconds from its arrival until a step took it up


def empty_deltas() -> Deltas:
    none = np.zeros(0, np.int32)
    return Deltas(
        np.zeros(0, np.int64), none, np.zeros(0, np.int8), none, np.zeros(1, np.int32), none
    )
