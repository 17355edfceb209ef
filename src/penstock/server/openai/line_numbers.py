"""Many line numbers, told in one line: 1-3, 7, 9-12.

They are kept as spans, so a file whose every line is bad costs no more memory than one with a single bad line. A batch
tells those of its lines by it, `penstock run` those of its rows. It knows numbers; no file.
"""

from __future__ import annotations

MOST_SPANS = 25_000  # 3 MB; as many as the 50,000 lines of a batch can make


class LineNumbers:
    """Numbers that come in growing order. Past MOST_SPANS spans, only their count and the last are told."""

    def __init__(self) -> None:
        self._spans: list[list[int]] = []  # first and last
        self._size = self._untold = self._last = 0

    def __len__(self) -> int:
        return self._size

    @property
    def first(self) -> int:
        """The lowest; there must be one."""
        return self._spans[0][0]

    def add(self, number: int) -> None:
        self._size += 1
        self._last = number
        if self._spans and number == self._spans[-1][1] + 1:
            self._spans[-1][1] = number
        elif len(self._spans) < MOST_SPANS:
            self._spans.append([number, number])
        else:
            self._untold += 1

    def __str__(self) -> str:
        told = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in self._spans)
        return told + (f" and {self._untold} more up to {self._last}" if self._untold else "")
