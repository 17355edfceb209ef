"""ReplicaStream: a request's deltas from several replicas. Also holds the state of a replica
(Replica), and seeds that are drawn before the replica is chosen (Seeds).

Knows deltas and their ends; routing and lost parts are handled by ReplicaSet (replica_set.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.engine.async_client import AsyncClient
from penstock.engine.client import PendingRequest
from penstock.engine.request_stream import CancelRequest, Stream
from penstock.errors import PenstockError
from penstock.replicas.replica_stats import ReplicaStats
from penstock.request import MAX_SEED, Delta, SamplingParams


@dataclass(slots=True, eq=False)
class Replica:
    """State of one replica, as a ReplicaSet sees it. client: the client of its latest engine
    process."""

    number: int
    stats: ReplicaStats = field(default_factory=ReplicaStats)
    client: AsyncClient | None = None
    leaving: bool = False
    lives: int = 0  # number of engine processes that the replica has had
    samples: int = 0  # this set's samples on it that have not ended

    @property
    def takes(self) -> bool:
        return self.client is not None and self.client.alive and not self.leaving


class RequestPart(Stream):
    """Samples of a request drawn by one replica; their deltas go to the whole request's stream."""

    def __init__(
        self,
        whole: ReplicaStream,
        replica: Replica,
        samples: Sequence[int],
        asked: PendingRequest,
        cancel: CancelRequest,
    ) -> None:
        super().__init__(asked, cancel)
        self.whole, self.replica, self.samples = whole, replica, samples
        self.begun: set[int] = set()  # samples that sent deltas before their end
        replica.samples += len(samples)
        whole.parts.add(self)

    def push(self, news: list[Delta]) -> None:
        if self.asked.stream:
            self.begun.update(delta.index for delta in news)
        self.whole.push(news)

    def end(self, error: PenstockError | None = None) -> None:
        if self._end is False:
            self._end = True
            self.whole.part_ended(self, error)

    def cancel(self) -> None:
        if self._end is False:
            self._end = True
            self._cancel(self.asked)
            self.whole.part_ended(self, None)


class ReplicaStream(Stream):
    """Deltas of one request, which may be drawn in parts by several replicas. asked: the
    PendingRequest of the first part, or of the part that replaced it."""

    def __init__(
        self,
        on_over: Callable[[RequestPart], None],
        on_lost: Callable[[RequestPart, PenstockError], None],
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        **how: Any,
    ) -> None:
        """on_over: called with each part that has ended; on_lost: called with a part that ended in
        an error, while others may go on. how: the other arguments of submit."""
        nothing: Any = None
        super().__init__(nothing, nothing)
        self.prompt_ids, self.sampling, self.how = prompt_ids, sampling, how
        self.parts: set[RequestPart] = set()
        self.deaths = 0  # number of replicas that died while they ran it
        self._on_over, self._on_lost = on_over, on_lost

    def cancel(self) -> None:
        self.end()
        for part in list(self.parts):
            part.cancel()

    def cut(self) -> None:
        for part in list(self.parts):
            part.cut()

    def fail(self, error: PenstockError) -> None:
        """Ends the request, and all its parts, with an error."""
        self.end(error)
        self.cancel()

    def part_ended(self, part: RequestPart, error: PenstockError | None) -> None:
        """Removes a part that has ended; ends the request with its last part."""
        self.parts.discard(part)
        if part.asked is not self.asked:
            self.asked.count_guesses(*part.asked.guesses)
        self._on_over(part)
        if self._end is not False:
            return
        if error is not None:
            self._on_lost(part, error)
        elif not self.parts:
            self.end()


class Seeds:
    """Seeds for requests without one, the same as an engine with this seed draws; different for
    each `number`."""

    def __init__(self, seed: int, number: int = 0) -> None:
        self._drawn = np.random.default_rng([seed, number] if number else seed)

    def give(self, sampling: SamplingParams) -> SamplingParams:
        """Returns the parameters with a seed. One is drawn for every request, so that setting one
        request's seed changes no other's."""
        drawn = int(self._drawn.integers(0, MAX_SEED))
        if sampling.seed is None:
            sampling = copy.copy(sampling)
            sampling.seed = drawn
        return sampling
