"""A progress line in the terminal. On a terminal it is overwritten in place; elsewhere it is
printed as a new line now and then.

Knows words, counts and an output stream; not the work under way.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TextIO

SELDOM = 10.0  # seconds between two lines when the output is no terminal
OFTEN = 0.1  # seconds between two updates of a bar
# characters per line: of a terminal that does not tell its width, and of a notebook's cell
WIDE, NARROW = 200, 100
CLEAR = "\r\x1b[K"


class StatusLine:
    """The status line of one stream (default: stderr). live: the stream is a terminal or a
    notebook's cell."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        # True in notebooks (Jupyter, VS Code and Colab)
        self._cell = type(self._out).__module__.startswith("ipykernel")
        self.live = self._cell or self._out.isatty()
        self._at = float("-inf")
        self._long = 0  # length of the line that a notebook's cell shows

    def show(self, text: str, *, anew: bool = False) -> None:
        """Shows the text, cut to the terminal's width. When the output is no terminal, prints a
        line only if the last one is SELDOM seconds old or `anew` is set."""
        if self.live:
            shown = text[: self._width()]
            self._write(self._clear() + shown)
            self._long = len(shown)
        elif anew or time.monotonic() - self._at >= SELDOM:
            self._at = time.monotonic()
            self._write(text + "\n")

    def keep(self, text: str) -> None:
        """Prints a line that later updates don't overwrite."""
        self._write((self._clear() if self.live else "") + text + "\n")

    def clear(self) -> None:
        """Removes the line from the screen."""
        if self.live:
            self._write(self._clear())

    def _clear(self) -> str:
        """Returns the characters that clear the line. A notebook's cell knows only carriage return,
        so the old text is overwritten with blanks."""
        long, self._long = self._long, 0
        return CLEAR if not self._cell else "\r" + " " * long + "\r" if long else "\r"

    def _width(self) -> int:
        with suppress(OSError):  # the stream is no file, or its terminal does not tell its width
            if self._cell:
                return NARROW
            return os.get_terminal_size(self._out.fileno()).columns - 1 or WIDE
        return WIDE

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class Bar:
    """A progress bar: how many of `total` are done, the time so far and the time left. everywhere:
    True: if the output is no terminal, prints a line now and then; False: prints nothing there."""

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
    """Returns a time as text: 40 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
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
    """Returns a share (0 to 1) as text: 58.8 %."""
    return f"{100 * share:.{digits}f} %"


def size_of(count: int) -> str:
    """Returns a number of bytes as text: 3.2 KiB, 14.5 MiB, 15.0 GiB."""
    power = min(3, max(1, (count.bit_length() - 1) // 10))
    return f"{count / 2 ** (10 * power):.1f} {' KMG'[power]}iB"
