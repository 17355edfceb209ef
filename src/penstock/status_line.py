"""A line that says how far something is: written over in its place on a terminal, elsewhere a line now and then.

It knows words and a stream to write to; not what is under way.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TextIO

SELDOM = 10.0  # seconds between two lines where nobody looks at a terminal
WIDE = 200  # characters, where the terminal does not say
CLEAR = "\r\x1b[K"


class StatusLine:
    """The line of one stream, stderr unless another is given. live: it is a terminal."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self.live = self._out.isatty()
        self._at = float("-inf")

    def show(self, text: str, *, anew: bool = False) -> None:
        """Writes the line over, as far as it fits; elsewhere a line, if the last one is long ago or this is anew."""
        if self.live:
            self._write(CLEAR + text[: self._width()])
        elif anew or time.monotonic() - self._at >= SELDOM:
            self._at = time.monotonic()
            self._write(text + "\n")

    def keep(self, text: str) -> None:
        """Writes a line that stays."""
        self._write((CLEAR if self.live else "") + text + "\n")

    def clear(self) -> None:
        """Takes the line away."""
        if self.live:
            self._write(CLEAR)

    def _width(self) -> int:
        with suppress(OSError):  # no file, or no terminal that knows
            return os.get_terminal_size(self._out.fileno()).columns - 1 or WIDE
        return WIDE

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def duration(seconds: float) -> str:
    """Returns 40 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    whole = round(seconds)
    for big, small, unit, rest in ((86_400, 3_600, "d", "h"), (3_600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= big:
            return f"{whole // big} {unit} {whole % big // small} {rest}"
    return f"{whole} s"
