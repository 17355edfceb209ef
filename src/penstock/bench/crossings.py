"""What a record says of each goal: the rate up to which first tokens come in time. It knows records alone."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.almanac.figures import crossing_of
from penstock.almanac.record import Goal, Point, Record


@dataclass(frozen=True, slots=True)
class Crossing:
    """Requests a second. meets: the highest open rate at which the goal was met; None: at none. fails: the lowest that
    missed it; None: none did. keeps, misses: the same of what is sure, by the 95 % intervals of the shares; between
    them the crossing lies."""

    seconds: float
    meets: float | None
    fails: float | None
    keeps: float | None
    misses: float | None

    def words(self, quantile: float) -> str:
        what = f"first token within {self.seconds:g} s for {100 * quantile:g} % of the requests"
        if self.meets is None and self.fails is None:
            return f"{what}: no rate was tried"
        if self.meets is None:
            return f"{what}: missed at {self.fails:.3g} a second, the lowest rate tried"
        beyond = f", missed at {self.fails:.3g}" if self.fails else ", and no higher one was tried"
        return f"{what}: up to {self.meets:.3g} requests a second offered{beyond}"


def crossings(record: Record) -> list[Crossing]:
    """Of each goal, by `crossing_of`. A point whose client was short says nothing of the server."""
    quantile, found = record.method.quantile, []
    for seconds in record.method.goals:
        rates = [
            (point.rate or 0.0, goal)
            for point in record.points
            if point.kind == "open" and not point.client.short and (goal := goal_of(point, seconds)) is not None
        ]
        meets, fails = crossing_of([(rate, goal.share) for rate, goal in rates], quantile)
        middle = meets or 0.0
        found.append(Crossing(
            seconds, meets, fails,
            keeps=max((rate for rate, goal in rates if rate <= middle and goal.low >= quantile), default=None),
            misses=min((rate for rate, goal in rates if rate > middle and goal.high < quantile), default=None),
        ))  # fmt: skip
    return found


def goal_of(point: Point, seconds: float) -> Goal | None:
    return next((goal for goal in point.goals if goal.seconds == seconds), None)
