"""MaskPatience: how long a draw waits for masks that are late. What is late then sits the step out.

    at least   so long that the device, which runs the step's forward, comes to the draw without a
    pause: learnt from
               whether it had paused
    beyond     while masks come fast: one that is waited for saves its row a whole step, and the
    wait costs every row of
               the step as much. With c masks a second, T seconds a step and n rows it pays while c
               T > n: of many
               rows it seldom does, of few nearly to the last mask. Rows without a form pay for
               nobody's: each counts
               as several

It knows seconds and numbers of rows; no masks.
"""

from __future__ import annotations

_SOONER, _LATER = 0.85, 1.15  # by which the least wait moves, a draw
_KEPT = 0.5  # of what was known of the rate of masks stays, a look
_FADE = 0.9  # the same of a step's seconds
_FREE = 8  # rows, that one without a form counts as
_PAUSE = (
    0.1  # seconds between two draws that are no step's length: nothing was to be done meanwhile
)


class MaskPatience:
    """Told of each late draw: `begin`, at each look `goes_on`, `ended`."""

    def __init__(self) -> None:
        self._least = 1e-3
        self._step = 0.0  # mean seconds from draw to draw
        self._begun = self._looked = 0.0
        self._rows = self._missing = 0
        self._rate = 0.0  # masks a second, over the last looks

    def begin(self, now: float, held: int, free: int, missing: int) -> None:
        """A draw of so many rows with a form and without may go out from now on; so many masks are
        not there."""
        took = now - self._begun
        if took < _PAUSE:
            self._step = took if not self._step else self._step * _FADE + took * (1 - _FADE)
        self._begun = self._looked = now
        self._rows, self._missing, self._rate = held + _FREE * free, missing, 0.0

    def goes_on(self, now: float, missing: int) -> bool:
        """Returns whether the draw is to wait on, of which so many masks are missing."""
        passed = max(now - self._looked, 1e-6)
        self._rate = self._rate * _KEPT + (self._missing - missing) / passed * (1 - _KEPT)
        self._looked, self._missing = now, missing
        return now < self._begun + self._least or self._rate * self._step > self._rows

    def ended(self, missing: int, paused: bool) -> None:
        """The draw is out. paused: the device had nothing left to do before."""
        if missing:  # else nothing was cut short
            self._least *= _SOONER if paused else _LATER
