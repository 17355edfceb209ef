"""The highest rate that meets each latency goal. A goal's crossing is the request rate up to which
first tokens come within the goal's seconds. Also reports the offered rates, and which rates are
lower bounds. Knows records alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.almanac.figures import Kept, kept_of, most_of, shows_nothing, sustained
from penstock.almanac.record import Goal, Point, Record

RANKED = " and can be ranked"


@dataclass(frozen=True, slots=True)
class Crossing:
    """The highest rate that meets one latency goal. kept: that rate with its interval. barred:
    rates of load levels that are left out because the client was the possible bottleneck. unserved:
    rates of load levels in which no request ended, so that the latency goal was neither met nor
    missed.
    """

    seconds: float
    kept: Kept
    barred: tuple[float, ...]
    unserved: tuple[float, ...]

    def words(self, quantile: float) -> str:
        what = f"first token within {self.seconds:g} s for {100 * quantile:g} % of the requests"
        if self.kept.rate is None:
            return f"{what}: {self.none}"
        kept = f"{what}: up to {in_three(self.kept.rate)} requests a second"
        if self.kept.missed is not None:
            return f"{kept}, missed where {in_three(self.kept.missed)} were offered"
        beyond = RANKED if any(rate > self.kept.rate for rate in self.barred) else ""
        return f"{kept}, missed at no higher rate that was tried{beyond}"

    @property
    def none(self) -> str:
        """Returns the reason why no rate meets the latency goal, if none does."""
        missed = self.kept.missed
        if missed is None and self.unserved:
            rates = ", ".join(in_three(rate) for rate in sorted(self.unserved))
            return f"tried at {rates} a second, and nothing was served in that window"
        if missed is None:
            return "no rate that was tried can be ranked" if self.barred else "no rate was tried"
        below = RANKED if any(rate < missed for rate in self.barred) else ""
        return f"missed at {in_three(missed)} a second, the lowest rate that was tried{below}"


def crossings(record: Record) -> list[Crossing]:
    """Returns the highest rate for each latency goal, from the open-loop load levels whose client
    was not short (no bottleneck)."""
    tried = [point for point in record.points if point.kind == "open" and point.rate is not None]
    barred = tuple(offered(point) for point in tried if point.client.short)
    ranked = [point for point in tried if not point.client.short]
    return [_crossing(record, ranked, seconds, barred) for seconds in record.method.goals]


def _crossing(
    record: Record, ranked: Sequence[Point], seconds: float, barred: tuple[float, ...]
) -> Crossing:
    quantile = record.method.quantile
    line = [
        (sustained(point), goal)
        for point in ranked
        if (goal := goal_of(point, seconds)) is not None
    ]
    unserved = tuple(here.offered for here, goal in line if shows_nothing(here, goal, quantile))
    return Crossing(seconds, kept_of(line, quantile, most_of(record.points)), barred, unserved)


def goal_of(point: Point, seconds: float) -> Goal | None:
    return next((goal for goal in point.goals if goal.seconds == seconds), None)


def in_three(rate: float) -> str:
    """Returns a rate with three digits, without an exponent."""
    return f"{float(f'{rate:.3g}'):g}"


def offered(point: Point) -> float:
    """Returns the requests a second that were sent in an open-loop load level's window; 0 for a
    load level of another kind."""
    return sustained(point).offered if point.kind == "open" and point.rate is not None else 0.0


def cut_off(point: Point) -> bool:
    """Returns True if the load level's time limit cut off its requests, so that its rates are lower
    bounds. (The rates of a steady window include cut requests, so they are no lower bounds.)
    """
    return point.opens is None and point.outcomes.get("unfinished", 0) > 0
