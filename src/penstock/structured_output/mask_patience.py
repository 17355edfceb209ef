"""MaskPatience: decides how long a draw waits for late masks. Rows whose mask is still missing sit
the step out.

    at least   as long as the device still runs the step's forward; learned from whether it had to
               pause
    longer     while masks come fast: each mask waited for saves its row a whole step, and waiting
               costs all n rows of the step. With c masks per second and T seconds per step waiting
               pays while c * T > n: for many rows seldom, for few nearly until the last mask. A row
               without a form counts as several: it should not wait for others

Knows seconds and numbers of rows; no masks.
"""

from __future__ import annotations

_SOONER, _LATER = 0.85, 1.15  # factors for the least wait, after each draw
_KEPT = 0.5  # weight of the old rate of masks, per check
_FADE = 0.9  # weight of the old seconds per step
_FREE = 8  # number of rows as which one row without a form counts
_PAUSE = (
    # seconds between two draws above which the engine was idle, and which don't count as a step
    0.1
)


class MaskPatience:
    """Waiting time of late draws. Call `begin` per draw, `goes_on` at each check, then `ended`."""

    def __init__(self) -> None:
        self._least = 1e-3
        self._step = 0.0  # mean seconds from draw to draw
        self._begun = self._looked = 0.0
        self._rows = self._missing = 0
        self._rate = 0.0  # masks per second, over the last checks

    def begin(self, now: float, held: int, free: int, missing: int) -> None:
        """Begins a draw with `held` rows with a form and `free` rows without; `missing` masks are
        missing."""
        took = now - self._begun
        if took < _PAUSE:
            self._step = took if not self._step else self._step * _FADE + took * (1 - _FADE)
        self._begun = self._looked = now
        self._rows, self._missing, self._rate = held + _FREE * free, missing, 0.0

    def goes_on(self, now: float, missing: int) -> bool:
        """Returns True if the draw should wait longer; `missing` masks are still missing."""
        passed = max(now - self._looked, 1e-6)
        self._rate = self._rate * _KEPT + (self._missing - missing) / passed * (1 - _KEPT)
        self._looked, self._missing = now, missing
        return now < self._begun + self._least or self._rate * self._step > self._rows

    def ended(self, missing: int, paused: bool) -> None:
        """Records that the draw was launched. paused: the device had finished all earlier work."""
        if missing:  # else no wait was cut short
            self._least *= _SOONER if paused else _LATER
