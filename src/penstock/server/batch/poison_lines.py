"""PoisonLines: points for lines of a batch that may have killed the engine, and their consequences.

    0, 1       the line runs like all others: one death may have any cause
    2          runs after all of these, a few at a time
    3 to 6     runs last, alone, fewer points first, once the engine has lived for a while
    KILLER     runs no more: the engine died each time that it ran

A death gives one point to each line that was at the engine, and ALONE points to a line that was
there without others and without online requests. A finished line loses its points. Knows numbers of
lines; no engine, no database.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

FEW_FROM, ALONE_FROM, KILLER = 2, 3, 7  # points
ALONE = 4  # points: two such deaths make a killer, and so does one after three others
# lines with two points that are at the engine at once, about; so many run alone after another death
FEW = 16

_decoder = msgspec.json.Decoder(dict[int, int])


class PoisonLines:
    """The points of one batch's lines, by line number. kept: result of `with_death` from an earlier
    server."""

    def __init__(self, kept: str | None = None) -> None:
        self._points = {} if kept is None else _decoder.decode(kept)

    def stage(self, number: int) -> int:
        """Returns the stage in which a line runs: 0 with all others, else its points."""
        points = self._points.get(number, 0)
        return points if FEW_FROM <= points < KILLER else 0

    def is_killer(self, number: int) -> bool:
        return self._points.get(number, 0) >= KILLER

    def stage_after(self, stage: int) -> int | None:
        """Returns the next stage that has lines, or None."""
        return min(
            (later for number in self._points if (later := self.stage(number)) > stage),
            default=None,
        )

    def forget(self, number: int) -> None:
        """Removes the points of a finished line."""
        self._points.pop(number, None)

    def with_death(self, evidence: Mapping[int, int]) -> str:
        """Returns the points after a death, with `evidence` added, in the form to keep."""
        points = {**self._points}
        for number, more in evidence.items():
            points[number] = points.get(number, 0) + more
        return msgspec.json.encode(points).decode()
