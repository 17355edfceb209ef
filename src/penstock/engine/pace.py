"""StepPace: measures seconds per drawn and per prompt token, and of steps by their queries. The
figures come from the durations of the engine's steps.

The router between replicas weighs requests by these figures (schedule/replica_router.py). The cost
of a drawn token is its cost in the fullest steps seen: in a step of few rows most of the time goes
to reading the weights, and one more row is nearly free. Knows numbers of steps and seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque

import numpy as np
from numpy.typing import NDArray

# Numbers of queries up to which steps are measured together, for the gate of drafts.
SIZES = [*range(1, 17), 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512]
_ENOUGH = 3  # steps of a size after which its seconds count as known
# Steps after which they no longer do: text has become longer or shorter meanwhile. To measure steps
# with drafts anew takes such steps, which may not pay.
_OLD, _OLD_DRAFTING = 2000, 8000
_FRESH = 250  # steps after which a size no longer bounds smaller ones
_NEWEST, _STEEPEST = 0.1, 0.3  # weight of the newest step, in logarithms, and its largest change
_FADE = 0.98  # weight of the old value in a running mean, at each step
# factor by which the stored least seconds grow per step, so that an outdated value is replaced
_FORGET = 1.0005


class _Sizes:
    """Mean seconds of steps, for each of SIZES. old: steps after which they are forgotten."""

    def __init__(self, old: int) -> None:
        self._old = old
        # steps seen of each size, the number of the last one, and the mean seconds
        self._seen, self._last = [0] * len(SIZES), [0] * len(SIZES)
        self._mean = [0.0] * len(SIZES)

    def measure(self, queries: int, took: float, count: int) -> None:
        """Takes in a step. count: its number among steps without prompts."""
        at = bisect_left(SIZES, queries)
        if at == len(SIZES) or took <= 0:
            return
        if count - self._last[at] > self._old:
            self._seen[at] = 0
        seen, mean = self._seen[at], self._mean[at]
        self._seen[at], self._last[at] = seen + 1, count
        if seen < _ENOUGH:
            self._mean[at] = min(took, mean) if seen else took
        else:
            change = min(max(math.log(took / mean), -_STEEPEST), _STEEPEST)
            self._mean[at] = mean * math.exp(_NEWEST * change)

    def known(self, count: int) -> dict[int, float]:
        """Returns size -> mean seconds, in ascending order, of sizes that were measured often
        enough and lately. count: number of steps without prompts so far. No step takes longer than
        one with more queries: what was measured so was disturbed."""
        found, least = dict[int, float](), math.inf
        for at in reversed(range(len(SIZES))):
            age = count - self._last[at]
            if self._seen[at] < _ENOUGH or age > self._old:
                continue
            found[SIZES[at]] = min(self._mean[at], least)
            if age <= _FRESH:
                least = found[SIZES[at]]
        return dict(reversed(found.items()))


class StepPace:
    """Measures steps. The engine calls `launched` and `read` for each step, in order."""

    def __init__(self) -> None:
        # launch of each step in flight, and the host's seconds for it, its commit excepted
        self._launched: deque[tuple[float, float]] = deque()
        self._read = 0.0
        # host seconds for other steps than the oldest in flight, since it began
        self._others = 0.0
        self._drawing = 0.0  # mean seconds of a step without prompts
        self._best = 0.0  # least seconds per row of a step so far
        self._plain, self._drafting = _Sizes(_OLD), _Sizes(_OLD_DRAFTING)
        self._count = 0  # steps without prompts
        self._extra = self._prompt_tokens = (
            0.0  # decaying sums: seconds added by prompts, and their tokens
        )

    def launched(self, now: float, before: float = 0.0, after: float = 0.0) -> None:
        """Records that a step was launched. before, after: seconds that the host has worked on it
        up to `now` and since then."""
        if self._launched:
            self._others += before + after
            self._launched.append((now, before + after))
        else:
            self._others = 0.0
            self._launched.append((now, before))

    def read(
        self,
        rows: int,
        prompt_tokens: int,
        now: float,
        queries: int = 0,
        drafting: bool = False,
        after: float = 0.0,
        waited: bool = False,
    ) -> None:
        """Records that the oldest step was read. It began at its launch, or at the end of the step
        before it, whichever is later. queries: its rows and drafts; 0: the step
        isn't measured by them. drafting: True if it had drafts or made some. after: seconds that
        the host has worked on it since `now`. waited: True if the host had to wait for the device.

        Where the host doesn't wait, it bounds the steps. While one runs it works on its neighbours,
        and a step with drafts is more work. So a measured step takes the host's seconds for itself
        then, not for them."""
        launched, host = self._launched.popleft()
        took, self._read = max(0.0, now - max(launched, self._read)), now
        own = took if waited and self._others else took - self._others + host + after
        self._others = after
        if prompt_tokens:
            self._extra = self._extra * _FADE + max(0.0, took - (self._drawing if rows else 0.0))
            self._prompt_tokens = self._prompt_tokens * _FADE + prompt_tokens
        elif rows:
            self._drawing = (
                took if not self._drawing else self._drawing * _FADE + took * (1 - _FADE)
            )
            self._best = min(self._best * _FORGET, took / rows) if self._best else took / rows
            self._count += 1
            if queries:
                (self._drafting if drafting else self._plain).measure(queries, own, self._count)

    def alone(self, rows: int) -> float:
        """Returns the seconds of a step of so many rows without prompts or drafts, between known
        numbers by interpolation; 0: unknown. Beyond them they are known up to twice or half of one,
        so that rows which draft in each step must do without from time to time."""
        known = self._plain.known(self._count)
        if not known or not min(known) <= 2 * rows or not rows <= 2 * max(known):
            return 0.0
        return float(np.interp(rows, [*known], [*known.values()]))

    def least_drafting(self, rows: int) -> float:
        """Returns the seconds of a step of so many rows with the fewest drafts that were measured,
        at most three a row; 0: no such step was measured."""
        known = self._drafting.known(self._count)
        return next((took for n, took in known.items() if rows < n <= 4 * rows), 0.0)

    def with_drafts(self, rows: int, queries: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the seconds of a step of so many rows for each number of queries [n] above it,
        with all that drafting takes. Beyond the largest number that was measured, seconds rise on
        as they did up to it. Before any was measured, a draft counts as a row. Call it only if
        `alone` knows these rows."""
        drafted = {n: took for n, took in self._drafting.known(self._count).items() if n > rows}
        known = {rows: self.alone(rows)} | drafted if drafted else self._plain.known(self._count)
        sizes, means = np.array([*known]), np.array([*known.values()])
        found: NDArray[np.float64] = np.interp(queries, sizes, means)
        if drafted:
            rise = max(0.0, (means[-1] - means[-2]) / (sizes[-1] - sizes[-2]))
            found += rise * np.maximum(queries - sizes[-1], 0)
        return found

    def sizes(self, least: int, most: int) -> NDArray[np.int64]:
        """Returns the numbers of queries between `least` and `most` up to which steps are measured
        together."""
        within = [size for size in SIZES if least <= size < most]
        return np.array(within + [most] * (least <= most <= SIZES[-1]), np.int64)

    def stats(self) -> dict[str, float]:
        """Returns the seconds per token, per prompt token and per step without prompts;
        0: unknown."""
        return {
            "token_seconds": self._best,
            "prompt_token_seconds": self._extra / self._prompt_tokens
            if self._prompt_tokens
            else 0.0,
            "step_seconds": self._drawing,
        }
