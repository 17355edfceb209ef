"""A line that says how far something is: written over in its place on a terminal, elsewhere a line
now and then.

It knows words, counts and a stream to write to; not what is under way.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TextIO

SELDOM = 10.0  # seconds between two lines where nobody looks at a terminal
OFTEN = 0.1  # seconds between two lines of a bar
WIDE, NARROW = 200, 100  # characters: where the terminal does not say; of a notebook's cell
CLEAR = "\r\x1b[K"


class StatusLine:
    """The line of one stream, stderr unless another is given. live: it is a terminal, or a
    notebook's cell."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        # Jupyter's, VS Code's and Colab's
        self._cell = type(self._out).__module__.startswith("ipykernel")
        self.live = self._cell or self._out.isatty()
        self._at = float("-inf")
        self._long = 0  # characters of the line that a cell shows

    def show(self, text: str, *, anew: bool = False) -> None:
        """Writes the line over, as far as it fits; elsewhere a line, if the last one is long ago or
        this is anew."""
        if self.live:
            shown = text[: self._width()]
            self._write(self._clear() + shown)
            self._long = len(shown)
        elif anew or time.monotonic() - self._at >= SELDOM:
            self._at = time.monotonic()
            self._write(text + "\n")

    def keep(self, text: str) -> None:
        """Writes a line that stays."""
        self._write((self._clear() if self.live else "") + text + "\n")

    def clear(self) -> None:
        """Takes the line away."""
        if self.live:
            self._write(self._clear())

    def _clear(self) -> str:
        """Returns what takes the line away; a cell knows a carriage return alone, so blanks are
        written over it."""
        long, self._long = self._long, 0
        return CLEAR if not self._cell else "\r" + " " * long + "\r" if long else "\r"

    def _width(self) -> int:
        with suppress(OSError):  # no file, or no terminal that knows
            if self._cell:
                return NARROW
            return os.get_terminal_size(self._out.fileno()).columns - 1 or WIDE
        return WIDE

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class Bar:
    """How many of `what` are done, since when, and how long the others should take. everywhere:
    where nobody looks at a terminal it says so seldom; without, never."""

    def __init__(self, total: int, what: str = "samples", *, everywhere: bool = False) -> None:
        self._line = StatusLine()
        self._total, self._done, self._what = total, 0, what
        self._begin = self._shown = time.monotonic()
        self._pause = OFTEN if self._line.live else SELDOM if everywhere else float("inf")

    def advance(self, count: int = 1) -> None:
        self._done += count
        if time.monotonic() - self._shown > self._pause:
            self._shown = time.monotonic()
            self._line.show(self._text(), anew=True)

    def close(self) -> None:
        if self._line.live:
            self._line.keep(self._text())

    def _text(self) -> str:
        took = time.monotonic() - self._begin
        left = (
            f", about {duration(took / self._done * (self._total - self._done))} left"
            if self._done
            else ""
        )
        return f"penstock: {self._done:,}/{self._total:,} {self._what}, {duration(took)}{left}"


def duration(seconds: float) -> str:
    """Returns 40 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    whole = round(seconds)
    for big, small, unit, rest in (
        (86_400, 3_600, "d", "h"),
        (3_600, 60, "h", "min"),
        (60, 1, "min", "s"),
    ):
        if whole >= big:
            return f"{whole // big} {unit} {whole % big // small} {rest}"
    return f"{whole} s"


def percent(share: float, digits: int = 1) -> str:
    """Returns a share of 1 as 58.8 %."""
    return f"{100 * share:.{digits}f} %"


def size_of(count: int) -> str:
    """Returns so many bytes as 3.2 KiB, 14.5 MiB, 15.0 GiB."""
    power = min(3, max(1, (count.bit_length() - 1) // 10))
    return f"{count / 2 ** (10 * power):.1f} {' KMG'[power]}iB"
