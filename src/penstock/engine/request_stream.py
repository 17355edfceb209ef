"""Stream: one request's news for a reader on an asyncio loop, which may be slow. It knows deltas;
no engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from penstock.engine.client import PendingRequest
from penstock.engine.logprobs import LazyLogprobs
from penstock.errors import PenstockError
from penstock.request import Delta

BEHIND = 1_024  # deltas that a reader may leave lying before they are merged
# tokens with logprobs from which on a merged delta grows no more: no merge copies all that waits
SCORED = 16


class CancelRequest(Protocol):
    """Ends a request. told: what its samples have made comes up first, as their ends."""

    def __call__(self, asked: PendingRequest, *, told: bool = False) -> None: ...


class Stream:
    """One request's deltas: `async for deltas in stream` until all its samples have ended. For one
    reader, who may `listen` and `take` instead."""

    def __init__(self, asked: PendingRequest, cancel: CancelRequest) -> None:
        self.asked = asked
        self._cancel = cancel
        self._news: list[Delta] = []  # what the reader hasn't taken
        self._merge_at = BEHIND  # deltas that wait for the reader, from which on they are merged
        self._end: PenstockError | bool = False  # whether, and with what, it has ended
        self._waiter: asyncio.Future[None] | None = (
            None  # the reader's, while there is nothing for it
        )
        self._hear: Callable[[], None] | None = None  # the reader's, of one that listens

    def cancel(self) -> None:
        """Ends the request wherever it stands and ends the iteration; its blocks go back.
        Idempotent."""
        self._cancel(self.asked)
        self.end()

    def cut(self) -> None:
        """Has the samples that have not ended end, and told with what they have made."""
        self._cancel(self.asked, told=True)

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        try:
            while True:
                if self._news:
                    news, self._news = self._news, []  # a reader that is behind gets all at once
                    yield news
                elif self._end is not False:
                    if isinstance(self._end, PenstockError):
                        raise self._end
                    return
                else:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        finally:
            # a reader that goes away early frees the blocks; after the last delta it changes
            # nothing
            self.cancel()

    def listen(self, hear: Callable[[], None]) -> None:
        """Has `hear` called when there is news, and at the end: who reads thousands of streams has
        no task for each."""
        if self._end is False:
            self._hear = hear
        if self._news or self._end is not False:
            hear()

    def take(self) -> tuple[list[Delta], bool]:
        """Returns what has come, and whether no more will. Raises what it ended with, in place of
        what came before."""
        if isinstance(self._end, PenstockError):
            raise self._end
        news, self._news = self._news, []
        return news, self._end is True

    def push(self, news: list[Delta]) -> None:
        """StepOutputs; the list is the stream's from here on. None come after the end."""
        if self._news:
            for delta in news:
                if isinstance(
                    delta.logprobs, LazyLogprobs
                ):  # a reader that is behind keeps no message after message
                    delta.logprobs = delta.logprobs.apart()
            self._news += news
            if len(self._news) > self._merge_at:
                self._merge()
        else:
            self._news = news
        self._wake()

    def end(self, error: PenstockError | None = None) -> None:
        """No more will come. The first end counts."""
        if self._end is False:
            self._end = True if error is None else error
        self._wake()
        self._hear = (
            None  # who listens holds the stream: a cycle, which would lie until the collector comes
        )

    def _merge(self) -> None:
        """The reader is far behind: a sample's deltas become one, with logprobs one for about
        SCORED tokens. So what waits is bounded by the samples and their tokens."""
        last: dict[int, Delta] = {}
        scores: dict[int, list[LazyLogprobs]] = {}  # of the last deltas, in parts
        kept: list[Delta] = []
        for delta in self._news:
            before, mine = last.get(delta.index), delta.logprobs
            assert mine is None or isinstance(mine, LazyLogprobs)
            if before is None or (mine is not None and len(before.token_ids) >= SCORED):
                _join(before, scores.pop(delta.index, []))
                last[delta.index] = delta
                kept.append(delta)
            else:
                before.text += delta.text
                before.token_ids += delta.token_ids
                before.finish_reason, before.stop_reason = delta.finish_reason, delta.stop_reason
                before.error, before.error_param = delta.error, delta.error_param
                before.weights_version = delta.weights_version
            if mine is not None:
                scores.setdefault(delta.index, []).append(mine)
        for index, parts in scores.items():
            _join(last[index], parts)
        self._news = kept
        self._merge_at = max(BEHIND, 2 * len(kept))

    def _wake(self) -> None:
        if self._hear is not None:
            self._hear()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _join(delta: Delta | None, parts: list[LazyLogprobs]) -> None:
    """A delta's logprobs, of the deltas that it was merged from."""
    if delta is not None and parts:
        delta.logprobs = LazyLogprobs.joined(parts)
