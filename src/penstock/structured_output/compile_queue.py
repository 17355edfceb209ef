"""CompileQueue: requests that wait for their grammar's compilation. A grammar (class Form) is the
schema, regex or Lark of a structured output. The engine's loop goes on while it is compiled. Knows
requests and grammars; no scheduler, no channel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.request import REST, Request
from penstock.structured_output.mask_pool import Form, MaskPool


class CompileQueue:
    """Requests that are not in the engine yet, since their grammar is being compiled."""

    def __init__(self, pool: MaskPool | None) -> None:
        self._pool = pool
        self._requests: dict[int, tuple[Request, Form]] = {}
        # ids of requests that were cancelled with REST, whose samples' final deltas the engine must
        # still send
        self._cut: set[int] = set()

    @property
    def waiting(self) -> bool:
        """Returns True if any request waits for its grammar."""
        return bool(self._requests)

    @property
    def request_ids(self) -> list[int]:
        """Returns the ids of the waiting requests."""
        return list(self._requests)

    def put(self, request: Request) -> bool:
        """Queues a request whose grammar is not compiled yet. Returns False if the request need not
        wait."""
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
        """Removes and returns the requests whose grammar is compiled or refused. MaskPool.factory
        raises the refusal. Each request comes with its Form, since the pool may drop that
        meanwhile."""
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
        """Drops a waiting request, or one of its samples. Returns False if the request isn't here.
        With sample=REST the request stays, and the engine later sends its samples' final deltas
        (see take_cut)."""
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
        """Drops all requests whose ids satisfy `of`. Called when a client has gone."""
        for request_id in [number for number in self._requests if of(number)]:
            self.cancel(request_id, None)
