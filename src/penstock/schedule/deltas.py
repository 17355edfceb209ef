"""Deltas: the output of one step, in arrays. One message holds all samples of a step; it crosses
the channel unchanged.

Knows ids and numbers only; the client makes text of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.step import Float32, Int32, Int64

GOES_ON = -1  # value of `finish` for a running sample; else an index into request.FINISH_REASONS
STOP, LENGTH, ABORT, ERROR = range(4)
# a reader spends as much time on a sample itself as on so many tokens
SAMPLE_WEIGHT = 64
NO_STOP_ID = -1  # value of `stop_id` if no stop_token_ids entry ended the sample


@dataclass(slots=True)
class Deltas:
    """Output of k samples. `tokens` and the logprob arrays hold sample i's entries at start[i] :
    start[i + 1]; n is their length, j the number of most likely tokens with logprobs."""

    request: Int64  # [k] request ids
    sample: Int32  # [k] sample indices
    finish: NDArray[np.int8]  # [k] GOES_ON, or the reason why the sample ended
    stop_id: Int32  # [k] the stop_token_ids entry that ended it, or NO_STOP_ID
    start: Int32  # [k + 1] offsets into the arrays [n]
    tokens: Int32  # [n] token ids
    chosen: Float32 | None = None  # [n] logprob of each token, NaN if its request wants none
    rank: Int32 | None = None  # [n] rank of each token, from 1
    # [n, j] ids of the most likely tokens at each position, padded with -1
    top_ids: Int32 | None = None
    top: Float32 | None = None  # [n, j] logprobs of the most likely tokens
    prompts: list[PromptNews] = field(default_factory=list)
    # [2, k] right and wrong drafts since the sample's last delta; None: nothing was drafted
    guesses: Int32 | None = None

    @property
    def count(self) -> int:
        return int(self.request.size)

    def in_parts(self, most: int) -> Iterator[Deltas]:
        """Yields these deltas in messages of at most about `most` tokens, for a reader that also
        serves other streams: a step in which thousands of whole samples end has millions of tokens.
        A sample counts as SAMPLE_WEIGHT tokens more than it has, and is never split."""
        weight = self.start.astype(np.int64) + SAMPLE_WEIGHT * np.arange(self.count + 1)
        total = int(weight[-1])
        if total <= most:
            yield self
            return
        cuts = np.searchsorted(weight, np.arange(most, total, most))
        for low, high in pairwise(np.unique([0, *cuts, self.count]).tolist()):
            yield self.part(np.arange(low, high), self.prompts if low == 0 else [])

    def part(self, samples: Int64, prompts: list[PromptNews]) -> Deltas:
        """Returns the deltas of some samples, by indices [k] into the columns, with `prompts`."""
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
            guesses=None if self.guesses is None else self.guesses[:, samples],
        )


@dataclass(slots=True)
class PromptNews:
    """Sent once per request, before its first tokens: the number of cached tokens, and the prompt's
    logprobs if requested."""

    request: int
    cached_tokens: int
    chosen: Float32 | None = None  # [prompt - 1] logprobs of prompt tokens 1, 2, ...
    rank: Int32 | None = None
    top_ids: Int32 | None = None  # [prompt - 1, k] ids of the k most likely tokens at each position
    top: Float32 | None = None
    waited: float = 0.0  # seconds from arrival to the first step that takes the request up


def empty_deltas() -> Deltas:
    none = np.zeros(0, np.int32)
    return Deltas(
        np.zeros(0, np.int64), none, np.zeros(0, np.int8), none, np.zeros(1, np.int32), none
    )
