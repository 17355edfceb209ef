"""PoisonLines: points for lines that may kill the engine. A line with more points runs later, and
with fewer others.

    0, 1       the line runs in order, since a single death may have any cause
    2          the line runs after all lines with 0 or 1 points, a few at a time
    3 to 6     it runs last and alone, fewer points first, once the engine has run for a while
    KILLER     it doesn't run any more: the engine died each time that it ran

The engine's death gives one point to each line that was at the engine, or ALONE points to a line
that was there without other lines and without online requests. A finished line loses its points.
Knows numbers of lines; no engine, no database.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

# points from which a line runs with few others, runs alone, and does not run any more
FEW_FROM, ALONE_FROM, KILLER = 2, 3, 7
# points for a death while the line ran alone: two such deaths make a killer, and so does one after
# three others
ALONE = 4
# lines with two points that are at the engine at once, about; after another death these must run
# alone
FEW = 16

_decoder = msgspec.json.Decoder(dict[int, int])


class PoisonLines:
    """The points of one batch's lines, by line number. kept: result of `with_death` that an earlier
    server stored."""

    def __init__(self, kept: str | None = None) -> None:
        self._points = {} if kept is None else _decoder.decode(kept)

    def stage(self, number: int) -> int:
        """Returns the stage in which a line runs: 0 for the first stage, else its points."""
        points = self._points.get(number, 0)
        return points if FEW_FROM <= points < KILLER else 0

    def is_killer(self, number: int) -> bool:
        return self._points.get(number, 0) >= KILLER

    def stage_after(self, stage: int) -> int | None:
        """Returns the next stage that has lines, or None if there is none."""
        return min(
            (later for number in self._points if (later := self.stage(number)) > stage),
            default=None,
        )

    def forget(self, number: int) -> None:
        """Removes the points of suspicion of a finished line."""
        self._points.pop(number, None)

    def with_death(self, evidence: Mapping[int, int]) -> str:
        """Returns the points after the engine's death, as text to store. evidence: points to add,
        by line number."""
        points = {**self._points}
        for number, more in evidence.items():
            points[number] = points.get(number, 0) + more
        return msgspec.json.encode(points).decode()
