"""MaskPatience: decides how long sampling waits for masks. A row whose mask is still missing gets
no token in this step.

    at least   as long as the device still computes the step's logits; learned from whether the
               device had to pause
    longer     while masks come fast. A mask that comes saves its row a whole step, and waiting
               costs all n rows of the step. With c masks per second and T seconds per step, waiting
               pays while c * T > n. A row without a grammar counts as several rows, since it should
               not wait for others

Knows seconds and numbers of rows; no masks.
"""

from __future__ import annotations

# factors of the least wait after each step: down if the device paused, up if not
_SOONER, _LATER = 0.85, 1.15
_KEPT = 0.5  # weight of the old rate in the running mean of masks per second, per check
_FADE = 0.9  # weight of the old value in the running mean of seconds per step
_FREE = 8  # number of rows that a row without a grammar counts as
_PAUSE = (
    # seconds between two samplings above which the engine was idle, so that they don't count as a
    # step
    0.1
)


class MaskPatience:
    """Decides the waiting time of one engine's steps. Call `begin` for each sampling, `goes_on` at
    each check for new masks, then `ended`."""

    def __init__(self) -> None:
        self._least = 1e-3
        self._step = 0.0  # mean seconds from one sampling to the next
        self._begun = self._looked = 0.0
        self._rows = self._missing = 0
        self._rate = 0.0  # masks per second, over the last checks

    def begin(self, now: float, held: int, free: int, missing: int) -> None:
        """Begins a sampling. now: seconds. held, free: number of rows with and without a grammar.
        missing: number of missing masks."""
        took = now - self._begun
        if took < _PAUSE:
            self._step = took if not self._step else self._step * _FADE + took * (1 - _FADE)
        self._begun = self._looked = now
        self._rows, self._missing, self._rate = held + _FREE * free, missing, 0.0

    def goes_on(self, now: float, missing: int) -> bool:
        """Returns True if the sampling should wait longer. missing: number of masks that are still
        missing."""
        passed = max(now - self._looked, 1e-6)
        self._rate = self._rate * _KEPT + (self._missing - missing) / passed * (1 - _KEPT)
        self._looked, self._missing = now, missing
        return now < self._begun + self._least or self._rate * self._step > self._rows

    def ended(self, missing: int, paused: bool) -> None:
        """Records that the sampling was launched. paused: True if the device had finished all
        earlier work."""
        if missing:  # if no mask is missing, no wait was cut short
            self._least *= _SOONER if paused else _LATER
