"""Limits the requests that wait or run. The limits are shared between API keys. Also computes the
seconds of Retry-After.

Counts samples and prompt tokens (once per prompt, whatever n is) that were accepted and not yet
answered. An "open" sample or token is one of a request that was accepted and not yet answered. Half
of each limit is divided between the keys; any key may use the other half. A request larger than a
limit is accepted when nothing else is open. Each of several server processes has an equal share of
a key's limit, which a single request may exceed. Knows counts and keys; no bodies, no engine.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from penstock.server.online.api_keys import Key
from penstock.server.openai.http_errors import HttpError

QUEUED_A_ROW = 8  # default limit of open samples per row of the engine
# default limit of open prompt tokens; they take 0.6 GB if every prompt is one token
QUEUED_TOKENS = 16 * 1024 * 1024
# seconds with work over which the drain rate (finished samples or tokens per second) is measured
WINDOW = 10.0
# seconds to wait while the drain rate is unknown, since there was work for less than WINDOW
FIRST_WAIT = 5
LONGEST_WAIT = 60  # most seconds in Retry-After; OpenAI's clients ignore longer ones
NOBODY = ""  # owner name of requests without an API key


class QueueFullError(HttpError):
    """Raised when the limits, or a key's share of them, have no room at this moment."""

    status, code = 429, "queue_full"

    def __init__(self, message: str, seconds: int, *, code: str | None = None) -> None:
        super().__init__(message, code=code, headers={"retry-after": str(seconds)})


class Pool:
    """One limited quantity (samples or tokens), and how much of it each key holds. Only a request
    that is alone may exceed the limit `most`. keys: number of API keys."""

    def __init__(self, most: int, keys: int, clock: Callable[[], float]) -> None:
        self.most = most
        self.total = 0
        self._clock = clock
        # seconds in which anything was open, counted up to the time `_since`
        self._worked = 0.0
        self._since = 0.0  # time of the last change of `total`
        # [number of the second, amount given back in it] for the last WINDOW seconds, where seconds
        # count only while something is open
        self._drained: deque[list[float]] = deque()
        keys = max(keys, 1)
        # amount reserved for each key; with many keys 1, if the limit allows
        self._own = max(most // (2 * keys), min(most // keys, 1))
        self._shared = most - self._own * keys
        self._held: dict[str, int] = {}

    def worked(self) -> float:
        """Returns the seconds in which anything was open so far. Idle time doesn't count, since it
        says nothing about the drain rate."""
        return self._worked + (self._clock() - self._since if self.total else 0.0)

    def held(self, name: str) -> int:
        return self._held.get(name, 0)

    def room(self, name: str) -> int:
        """Returns how much more the key `name` may take; 0 or less means nothing."""
        return max(self._own - self.held(name), 0) + self._shared

    def add(self, name: str, amount: int) -> None:
        """Takes `amount` for the key `name`; a negative amount gives back."""
        before = self.held(name)
        after = before + amount
        self._shared -= max(after - self._own, 0) - max(before - self._own, 0)
        worked = self.worked()
        self.total += amount
        self._worked, self._since = worked, self._clock()
        if after:
            self._held[name] = after
        else:
            self._held.pop(name, None)

    def give_back(self, name: str, amount: int) -> None:
        """Gives back `amount` whose work is done, which counts for the drain rate."""
        self.add(name, -amount)
        second = math.floor(self.worked())
        if not self._drained or self._drained[-1][0] != second:
            self._drained.append([second, 0])
        self._drained[-1][1] += amount

    def rate(self) -> float:
        """Returns the drain rate: the amount given back per second in which anything was open."""
        now = self.worked()
        while self._drained and self._drained[0][0] < now - WINDOW:
            self._drained.popleft()
        return sum(amount for _, amount in self._drained) / min(max(now, 1.0), WINDOW)

    def wait_for(self, amount: int, name: str) -> int:
        """Returns the seconds until this key may expect room for `amount`, and for a tenth of the
        limit, at the present drain rate."""
        missing = max(amount - self.room(name), self.most // 10, 1)
        if rate := self.rate():
            return min(max(math.ceil(missing / rate), 1), LONGEST_WAIT)
        return FIRST_WAIT if self.worked() < WINDOW else LONGEST_WAIT


class RequestLimits:
    """Accepts or refuses requests. Each of several server processes has its own share of the
    limits, so that together they never accept more. A request is checked three times: by `check`
    before its body is read, by `acquire` after that, and by Ticket.adjust after it is tokenized."""

    def __init__(
        self,
        reqs: int,
        tokens: int,
        keys: int = 0,
        servers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reqs = Pool(max(reqs // servers, 1), keys, clock)
        self.tokens = Pool(max(tokens // servers, 1), keys, clock)
        self.refused = 0
        self._servers = servers

    def check(self, key: Key | None, reqs: int = 1, tokens: int = 1) -> None:
        """Raises QueueFullError if there is no room for `reqs` samples and `tokens` prompt tokens,
        and HttpError for more than the key's own limits ever allow. reqs: 0 if the samples are
        counted already."""
        if reqs:
            self._check(
                self.reqs, key, reqs, None if key is None else key.max_num_queued_reqs, "samples"
            )
        self._check(
            self.tokens,
            key,
            tokens,
            None if key is None else key.max_num_queued_tokens,
            "prompt tokens",
        )

    def acquire(self, key: Key | None, reqs: int, tokens: int) -> Ticket:
        """Accepts a request of `reqs` samples, and returns its ticket. tokens: estimate of its
        prompt tokens, since the text isn't tokenized yet. Raises the errors of check."""
        self.check(key, reqs, tokens)
        return Ticket(self, key, reqs, tokens)

    def _check(
        self, pool: Pool, key: Key | None, amount: int, limit: int | None, what: str
    ) -> None:
        name = NOBODY if key is None else key.name
        if limit is not None:
            if amount > limit:
                message = (
                    f"this API key may have {limit} {what} open at once, and this is more: ask for"
                    " less at once"
                )
                raise HttpError(message, code="key_limit")
            held = pool.held(name)
            # the key's only request may use the key's limit of all server processes
            if held and held + amount > limit // self._servers:
                self.refused += 1
                message = (
                    f"this API key has its {limit} {what} open: wait for answers before sending"
                    " more"
                )
                raise QueueFullError(
                    message, pool.wait_for(amount, name), code="rate_limit_exceeded"
                )
        if amount > pool.room(name) and pool.total:
            self.refused += 1
            message = (
                "the server has as much work as it takes: send this again after the seconds in"
                " Retry-After"
            )
            raise QueueFullError(message, pool.wait_for(amount, name))


class Ticket:
    """The open samples and tokens of one accepted request. Releasing them is idempotent."""

    def __init__(self, limits: RequestLimits, key: Key | None, reqs: int, tokens: int) -> None:
        self._limits, self._key = limits, key
        self._name = NOBODY if key is None else key.name
        self._reqs, self._tokens = reqs, tokens
        limits.reqs.add(self._name, reqs)
        limits.tokens.add(self._name, tokens)

    @property
    def owner(self) -> str:
        """Name of the request's key; NOBODY without a key."""
        return self._name

    def adjust(self, tokens: int) -> None:
        """Replaces the estimate by the real number of prompt tokens. Raises the errors of check if
        there is no room; the request then holds no tokens."""
        pool, about = self._limits.tokens, self._tokens
        pool.add(self._name, -about)
        self._tokens = 0
        if tokens > about:
            self._limits.check(self._key, 0, tokens)
        pool.add(self._name, tokens)
        self._tokens = tokens

    def ended(self, samples: int) -> None:
        """Gives back the room of `samples` samples that have ended."""
        samples = min(samples, self._reqs)
        self._reqs -= samples
        if samples:
            self._limits.reqs.give_back(self._name, samples)

    def release(self) -> None:
        """Gives back all samples and tokens that the request still holds, when it has ended in any
        way."""
        self.ended(self._reqs)
        tokens, self._tokens = self._tokens, 0
        if tokens:
            self._limits.tokens.give_back(self._name, tokens)
