"""Which lines of a batch may be what the engine dies of: points for what each death says, and what
follows of them.

    0, 1       the line runs as all do: one death may be anybody's
    2          behind all of those, a few at a time
    3 to 6     behind those, alone, fewer points first, and not before the engine has lived for a
    while
    KILLER     no more: the engine died each time that it ran

A death gives a point to each line that was at the engine, ALONE to one that was there by itself,
without online requests too; a line that is done has none any more. It knows numbers of lines; no
engine, no database.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

FEW_FROM, ALONE_FROM, KILLER = 2, 3, 7  # points
ALONE = 4  # points: two such deaths name a killer, and so does one after three others
# lines with two points that are at the engine at once, about: so many have to run alone after a
# death
FEW = 16

_decoder = msgspec.json.Decoder(dict[int, int])


class PoisonLines:
    """The points of one batch's lines, by their numbers. kept: what `with_death` gave an earlier
    server."""

    def __init__(self, kept: str | None = None) -> None:
        self._points = {} if kept is None else _decoder.decode(kept)

    def stage(self, number: int) -> int:
        """When a line has its turn: 0, with all others, or the points that it has."""
        points = self._points.get(number, 0)
        return points if FEW_FROM <= points < KILLER else 0

    def is_killer(self, number: int) -> bool:
        return self._points.get(number, 0) >= KILLER

    def stage_after(self, stage: int) -> int | None:
        """The next one that has lines."""
        return min(
            (later for number in self._points if (later := self.stage(number)) > stage),
            default=None,
        )

    def forget(self, number: int) -> None:
        """The line is done."""
        self._points.pop(number, None)

    def with_death(self, evidence: Mapping[int, int]) -> str:
        """To be kept: the points after a death that gives these more."""
        points = {**self._points}
        for number, more in evidence.items():
            points[number] = points.get(number, 0) + more
        return msgspec.json.encode(points).decode()
