"""A running call with its engine streams. A call is one request body; it has one stream per prompt.
It may end early by a client that leaves, a deadline, a shutdown or a dead engine. Knows the
engine's client; no bodies and no answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from starlette.types import Receive

from penstock.engine.group_stop import GroupStop
from penstock.errors import UsageError
from penstock.request import Delta
from penstock.server.online.app_state import AppState
from penstock.server.online.metrics import CallMetrics
from penstock.server.online.request_limits import Ticket
from penstock.server.openai.answer_forms import renamed
from penstock.server.openai.http_errors import SampleError, shutting_down, too_late
from penstock.server.openai.translate import Call

if TYPE_CHECKING:
    from penstock.engine.request_stream import Stream

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """Raised when the client closed its connection before its answer was complete."""


class ActiveCall:
    """The streams of one call, one per prompt, from submission to end. Keeps the call's ticket
    (request_limits.py) meanwhile. background: True for a line of a batch. No client waits for it,
    so its times are not counted as latencies."""

    def __init__(
        self,
        service: AppState,
        call: Call,
        ticket: Ticket | None = None,
        *,
        background: bool = False,
    ) -> None:
        self.call, self.ticket = call, ticket
        self.call_metrics = CallMetrics(service.metrics, call, background=background)
        self._open = True
        self.streams: list[Stream] = []
        stop_when = call.sampling.stop_when
        search = None if stop_when is None else service.patterns.of(stop_when.pattern)
        try:
            for prompt in call.prompts:
                stream = service.client.submit(
                    prompt.ids,
                    call.sampling,
                    stream=call.stream,
                    background=background,
                    tenant=call.tenant,
                    salt=call.salt,
                    answers=call.answers,
                    group_stop=None
                    if stop_when is None or search is None
                    else GroupStop(search.find, stop_when.agree),
                )
                self.streams.append(stream)
        except BaseException:
            self.cancel()
            raise

    async def steps(self) -> AsyncIterator[list[tuple[int, list[Delta]]]]:
        """Yields lists of (prompt index, its new deltas), for all prompts that have some. Raises
        PenstockError."""
        with self._forms_named():
            if len(self.streams) == 1:
                async for deltas in self.streams[0]:
                    self._note(0, deltas)
                    yield [(0, deltas)]
            else:
                async for step in _merged(self.streams):
                    for at, deltas in step:
                        self._note(at, deltas)
                    yield step
        self._finish()

    def listen(self, hear: Callable[[], None]) -> None:
        """Sets the function to call when `take` has new deltas. Only for a call with one prompt."""
        (stream,) = self.streams
        stream.listen(hear)

    def take(self) -> tuple[list[Delta], bool]:
        """Returns the new deltas, and True if they are the last. Alternative to `steps` for a call
        with one prompt. Raises PenstockError."""
        (stream,) = self.streams
        with self._forms_named():
            deltas, over = stream.take()
            self._note(0, deltas)
        if over and self._open:
            self._finish()
        return deltas, over

    def cancel(self) -> None:
        """Cancels the streams that still run; does nothing after the last delta."""
        if self._open:
            for stream in self.streams:
                stream.cancel()
            self._open = False
            self.call_metrics.cut()
            self._leave()

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Returns the numbers of tokens made, of cached prompt tokens, and of drafts that were
        right and that were wrong."""
        every = [stream.asked for stream in self.streams]
        right, wrong = (sum(asked.guesses[at] for asked in every) for at in range(2))
        cached = sum(asked.num_cached_tokens for asked in every)
        return self.call_metrics.made, cached, right, wrong

    def _finish(self) -> None:
        self._open = False
        self._leave()
        self.call_metrics.close(self.streams)

    @contextlib.contextmanager
    def _forms_named(self) -> Iterator[None]:
        """Renames, in UsageErrors of the engine about the answer format, the field to the one that
        the client sent."""
        try:
            yield
        except UsageError as error:
            named = renamed(error, self.call.form_field)
            if named is error:
                raise
            raise named from error

    def _leave(self) -> None:
        if self.ticket is not None:
            self.ticket.release()

    def _note(self, at: int, deltas: Sequence[Delta]) -> None:
        self.call_metrics.note(at, deltas)
        for delta in deltas:
            if delta.error is not None:
                if delta.error_param is None:
                    raise SampleError(delta.error)
                raise UsageError(delta.error, param=delta.error_param)
            if delta.finish_reason is not None and self.ticket is not None:
                self.ticket.ended(1)


async def _merged(streams: Sequence[Stream]) -> AsyncIterator[list[tuple[int, list[Delta]]]]:
    """Merges the deltas of several streams into lists of (stream index, its deltas). All deltas of
    one turn of the event loop are yielded together. While the caller handles them, the streams
    collect the next ones."""
    ready, news = dict[int, None](), asyncio.Event()
    left = set(range(len(streams)))

    def hear(at: int) -> None:
        ready[at] = None
        news.set()

    for at, stream in enumerate(streams):
        stream.listen(partial(hear, at))
    while left:
        await news.wait()
        news.clear()
        heard = sorted(left.intersection(ready))
        ready.clear()
        step: list[tuple[int, list[Delta]]] = []
        for at in heard:
            deltas, over = streams[at].take()
            if over:
                left.discard(at)
            if deltas:
                step.append((at, deltas))
        if step:
            yield step


async def until_gone(
    work: Awaitable[Result], receive: Receive, closing: asyncio.Event, deadline: float | None = None
) -> Result:
    """Runs `work` and returns its result. deadline: in the event loop's time. Raises
    ClientGoneError if the client leaves first, ShuttingDownError at the server's shutdown,
    HttpError at the deadline. Before that, cancels `work` and waits for its end."""
    left = None if deadline is None else max(deadline - asyncio.get_running_loop().time(), 0)
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    shut = asyncio.ensure_future(closing.wait())
    try:
        await asyncio.wait((task, gone, shut), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait((task,))
        if gone.done():
            raise ClientGoneError
        if deadline is not None and not shut.done():
            raise too_late()
        raise shutting_down()
    finally:
        for each in (task, gone, shut):
            each.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
