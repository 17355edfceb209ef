"""CompileQueue: holds requests with a structured output until their form (schema, regex or grammar)
is compiled, so that the engine's loop need not wait.

Knows requests and forms; no scheduler, no channel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.request import REST, Request
from penstock.structured_output.mask_pool import Form, MaskPool


class CompileQueue:
    """Requests on their way into an engine, each waiting for its form."""

    def __init__(self, pool: MaskPool | None) -> None:
        self._pool = pool
        self._requests: dict[int, tuple[Request, Form]] = {}
        # requests cancelled with REST: the engine must still send their samples' final deltas
        self._cut: set[int] = set()

    @property
    def waiting(self) -> bool:
        """Returns True if any request waits."""
        return bool(self._requests)

    @property
    def request_ids(self) -> list[int]:
        """Returns the ids of the waiting requests."""
        return list(self._requests)

    def put(self, request: Request) -> bool:
        """Takes a request whose form is not compiled yet. Returns False if it need not wait."""
        asked = request.sampling.structured_outputs
        if (
            asked is None
            or self._pool is None
            or (form := self._pool.ask(asked, request.background)).known
        ):
            return False
        self._requests[request.request_id] = request, form
        return True

    def ready(self) -> list[tuple[Request, Form]]:
        """Removes and returns the requests whose form is compiled or refused; MaskPool.factory
        raises the refusal. Each comes with its form, since the pool may drop it."""
        if self._pool is not None and self._requests:
            self._pool.look()
        out = [(request, form) for request, form in self._requests.values() if form.known]
        for request, _ in out:
            del self._requests[request.request_id]
        return out

    def take_cut(self, request_id: int) -> bool:
        """Returns True if a request returned by `ready` was cancelled here with REST."""
        found = request_id in self._cut
        self._cut.discard(request_id)
        return found

    def cancel(self, request_id: int, sample: int | None) -> bool:
        """Drops a waiting request, or one of its samples. Returns False if it isn't here. REST: the
        request stays, and the engine sends its samples' final deltas (take_cut)."""
        found = self._requests.get(request_id)
        if found is None:
            return False
        request, form = found
        if sample == REST:
            self._cut.add(request_id)
            return True
        kept = range(request.sampling.n) if request.samples is None else request.samples
        left = [] if sample is None else [index for index in kept if index != sample]
        if left:
            self._requests[request_id] = replace(request, samples=left), form
        else:
            del self._requests[request_id]
            self._cut.discard(request_id)
        return True

    def drop(self, of: Callable[[int], bool]) -> None:
        """Drops all requests whose ids satisfy `of`, when their client has gone."""
        for request_id in [number for number in self._requests if of(number)]:
            self.cancel(request_id, None)
