"""Stream: one request's deltas for an asyncio reader. A slow reader gets merged deltas. Knows
deltas; no engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from penstock.engine.client import PendingRequest
from penstock.engine.logprobs import LazyLogprobs
from penstock.errors import PenstockError
from penstock.request import Delta

BEHIND = 1_024  # deltas are merged when more than this many wait for the reader
# a merged delta with logprobs gets no further tokens beyond this number, so that a merge does not
# copy all waiting logprobs again
SCORED = 16


class CancelRequest(Protocol):
    """Function that ends a request. told: True: its samples first send their tokens so far, as
    their final deltas."""

    def __call__(self, asked: PendingRequest, *, told: bool = False) -> None: ...


class Stream:
    """Deltas of one request: `async for deltas in stream` until all its samples have ended. Has one
    reader, which may use `listen` and `take` instead."""

    def __init__(self, asked: PendingRequest, cancel: CancelRequest) -> None:
        self.asked = asked
        self._cancel = cancel
        self._news: list[Delta] = []  # deltas not yet taken by the reader
        self._merge_at = BEHIND  # number of waiting deltas above which they are merged
        self._end: PenstockError | bool = False  # True once ended, or the error it ended with
        self._waiter: asyncio.Future[None] | None = None  # the reader's future while no deltas wait
        self._hear: Callable[[], None] | None = None  # the callback of a reader that uses listen

    def cancel(self) -> None:
        """Ends the request at any point, frees its blocks, and ends the iteration. Idempotent."""
        self._cancel(self.asked)
        self.end()

    def cut(self) -> None:
        """Ends all samples that have not ended; each still sends its tokens so far."""
        self._cancel(self.asked, told=True)

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        try:
            while True:
                if self._news:
                    # a slow reader gets all waiting deltas at once
                    news, self._news = self._news, []
                    yield news
                elif self._end is not False:
                    if isinstance(self._end, PenstockError):
                        raise self._end
                    return
                else:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        finally:
            # a reader that leaves early frees the blocks; after the last delta, cancel does nothing
            self.cancel()

    def listen(self, hear: Callable[[], None]) -> None:
        """Registers `hear`, called when deltas arrive and at the end, so that a reader of thousands
        of streams needs no task for each."""
        if self._end is False:
            self._hear = hear
        if self._news or self._end is not False:
            hear()

    def take(self) -> tuple[list[Delta], bool]:
        """Returns the waiting deltas, and True once no more will come. Raises the stream's error,
        if any, instead of returning earlier deltas."""
        if isinstance(self._end, PenstockError):
            raise self._end
        news, self._news = self._news, []
        return news, self._end is True

    def push(self, news: list[Delta]) -> None:
        """Adds deltas, and takes ownership of the list. Never called after the end."""
        if self._news:
            for delta in news:
                if isinstance(
                    delta.logprobs, LazyLogprobs
                ):  # a slow reader must not keep whole messages alive
                    delta.logprobs = delta.logprobs.apart()
            self._news += news
            if len(self._news) > self._merge_at:
                self._merge()
        else:
            self._news = news
        self._wake()

    def end(self, error: PenstockError | None = None) -> None:
        """Ends the stream. Only the first call has an effect."""
        if self._end is False:
            self._end = True if error is None else error
        self._wake()
        self._hear = None  # the callback refers to the stream: drop the reference cycle

    def _merge(self) -> None:
        """Merges the waiting deltas of each sample into one, or, with logprobs, one per about
        SCORED tokens. This bounds the waiting data by the samples and their tokens."""
        last: dict[int, Delta] = {}
        # logprobs to be joined into the last delta of each sample
        scores: dict[int, list[LazyLogprobs]] = {}
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
    """Sets a merged delta's logprobs from its parts."""
    if delta is not None and parts:
        delta.logprobs = LazyLogprobs.joined(parts)
