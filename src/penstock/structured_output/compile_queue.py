"""CompileQueue: requests with a form, which wait on their way into an engine until it was compiled:
the loop doesn't.

It knows requests and forms; no scheduler, no channel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.request import REST, Request
from penstock.structured_output.mask_pool import Form, MaskPool


class CompileQueue:
    """Requests on their way into an engine: one with a form comes out when that is known."""

    def __init__(self, pool: MaskPool | None) -> None:
        self._pool = pool
        self._requests: dict[int, tuple[Request, Form]] = {}
        self._cut: set[int] = set()  # of which no sample is wanted any more, but a word of each

    @property
    def waiting(self) -> bool:
        """Whether a request is here."""
        return bool(self._requests)

    @property
    def request_ids(self) -> list[int]:
        """Those that are here."""
        return list(self._requests)

    def put(self, request: Request) -> bool:
        """Takes a request in whose form isn't known. Returns whether it did."""
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
        """Takes those out whose form is there, or was refused, as MaskPool.factory says again. Each
        with its form: the pool may keep it no more."""
        if self._pool is not None and self._requests:
            self._pool.look()
        out = [(request, form) for request, form in self._requests.values() if form.known]
        for request, _ in out:
            del self._requests[request.request_id]
        return out

    def take_cut(self, request_id: int) -> bool:
        """Whether a request that came out was cancelled here with REST."""
        found = request_id in self._cut
        self._cut.discard(request_id)
        return found

    def cancel(self, request_id: int, sample: int | None) -> bool:
        """Drops a request, or one sample of it, that is still here. Returns whether it was. REST:
        it comes out all the same, for the engine to tell of its samples (take_cut)."""
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
        """Drops all requests whose ids are `of` somebody who has gone."""
        for request_id in [number for number in self._requests if of(number)]:
            self.cancel(request_id, None)
