"""How much may be open at once before the engine, whose it is, and when to come again.

Bounded are samples and prompt tokens (a prompt counts once, whatever n is) that were accepted and
not yet answered. Half of each bound is shared out between the keys; the other half is whose comes
first. What alone is larger than a bound is taken when nothing else is open; so is, of several
servers, what a key asks of one beyond an equal part of its limit. It knows counts and keys; no
bodies, no engine.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from penstock.server.online.api_keys import Key
from penstock.server.openai.http_errors import HttpError

QUEUED_A_ROW = 8  # samples that may be open for each row of the engine, unless it is said
# prompt tokens that may be open, unless it is said: 0.6 GB where all are one by one
QUEUED_TOKENS = 16 * 1024 * 1024
WINDOW = 10.0  # seconds with work over which the drain is measured
FIRST_WAIT = (
    5  # seconds, while there was work for less than WINDOW and nothing is known of the drain
)
LONGEST_WAIT = 60  # seconds; the official clients wait no longer than this for a Retry-After
NOBODY = ""  # whose requests are where there are no keys


class QueueFullError(HttpError):
    """No room within the limits, or in a key's part of them, at this moment."""

    status, code = 429, "queue_full"

    def __init__(self, message: str, seconds: int, *, code: str | None = None) -> None:
        super().__init__(message, code=code, headers={"retry-after": str(seconds)})


class Pool:
    """One bounded quantity, and who holds how much of it. `most` is never passed, but by one that
    is alone."""

    def __init__(self, most: int, keys: int, clock: Callable[[], float]) -> None:
        self.most = most
        self.total = 0
        self._clock = clock
        self._worked = 0.0  # seconds with anything open, up to the last time that nothing was
        self._since = 0.0  # where anything is open: since when
        # over the last WINDOW of it: [second, amount given back]
        self._drained: deque[list[float]] = deque()
        keys = max(keys, 1)
        # each key's alone; of many keys 1, if it can be
        self._own = max(most // (2 * keys), min(most // keys, 1))
        self._shared = most - self._own * keys
        self._held: dict[str, int] = {}

    def worked(self) -> float:
        """A clock that stands still while nothing is open: rest says nothing of how fast things
        drain."""
        return self._worked + (self._clock() - self._since if self.total else 0.0)

    def held(self, name: str) -> int:
        return self._held.get(name, 0)

    def room(self, name: str) -> int:
        """How much more this key may take; 0 and less: nothing."""
        return max(self._own - self.held(name), 0) + self._shared

    def add(self, name: str, amount: int) -> None:
        """Takes; a negative amount is given back."""
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
        """Gives back what is done with."""
        self.add(name, -amount)
        second = math.floor(self.worked())
        if not self._drained or self._drained[-1][0] != second:
            self._drained.append([second, 0])
        self._drained[-1][1] += amount

    def rate(self) -> float:
        """Returns how much is given back a second."""
        now = self.worked()
        while self._drained and self._drained[0][0] < now - WINDOW:
            self._drained.popleft()
        return sum(amount for _, amount in self._drained) / min(max(now, 1.0), WINDOW)

    def wait_for(self, amount: int, name: str) -> int:
        """Seconds until this key may expect to find that much room, and a tenth of all, as things
        drain now."""
        missing = max(amount - self.room(name), self.most // 10, 1)
        if rate := self.rate():
            return min(max(math.ceil(missing / rate), 1), LONGEST_WAIT)
        return FIRST_WAIT if self.worked() < WINDOW else LONGEST_WAIT


class RequestLimits:
    """Who may come in. Of several server processes each has one with its part of the bounds, so
    that together they never accept more. A request asks three times: `check` by its head, `acquire`
    once its body is read, `adjust` once it is tokenised."""

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
        """Raises QueueFullError where there is no room, and HttpError for what the key's own limits
        never let in. reqs 0: they are there already."""
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
        """Returns a request's place. `tokens` is about how many: its text isn't tokenised yet.
        Raises as check."""
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
            if (
                held and held + amount > limit // self._servers
            ):  # what the key has nothing beside is within its limit
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
    """One request's place. Releasing it is idempotent."""

    def __init__(self, limits: RequestLimits, key: Key | None, reqs: int, tokens: int) -> None:
        self._limits, self._key = limits, key
        self._name = NOBODY if key is None else key.name
        self._reqs, self._tokens = reqs, tokens
        limits.reqs.add(self._name, reqs)
        limits.tokens.add(self._name, tokens)

    @property
    def owner(self) -> str:
        """The name of the key whose request it is; of all without one it is the same."""
        return self._name

    def adjust(self, tokens: int) -> None:
        """Takes the prompt tokens as they are now known. Raises as check, where they are more than
        there is room for; none are held then."""
        pool, about = self._limits.tokens, self._tokens
        pool.add(self._name, -about)
        self._tokens = 0
        if tokens > about:
            self._limits.check(self._key, 0, tokens)
        pool.add(self._name, tokens)
        self._tokens = tokens

    def ended(self, samples: int) -> None:
        """So many of its samples have ended."""
        samples = min(samples, self._reqs)
        self._reqs -= samples
        if samples:
            self._limits.reqs.give_back(self._name, samples)

    def release(self) -> None:
        """It is answered, however that went."""
        self.ended(self._reqs)
        tokens, self._tokens = self._tokens, 0
        if tokens:
            self._limits.tokens.give_back(self._name, tokens)
