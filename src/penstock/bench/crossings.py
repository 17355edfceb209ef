"""What a record says of each goal: the rate up to which first tokens come in time. It knows records alone."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.almanac.record import Goal, Point, Record


@dataclass(frozen=True, slots=True)
class Crossing:
    """Requests a second. meets: the highest open rate at which the goal was met; None: at none. fails: the lowest that
    missed it; None: none did."""

    seconds: float
    meets: float | None
    fails: float | None

    def words(self, quantile: float) -> str:
        what = f"first token within {self.seconds:g} s for {100 * quantile:g} % of the requests"
        if self.meets is None and self.fails is None:
            return f"{what}: no rate was tried"
        if self.meets is None:
            return f"{what}: missed at {self.fails:.3g} a second, the lowest rate tried"
        beyond = f", missed at {self.fails:.3g}" if self.fails else ", and no higher one was tried"
        return f"{what}: up to {self.meets:.3g} requests a second{beyond}"


def crossings(record: Record) -> list[Crossing]:
    """Of each goal; where rates don't agree (one above a failing one meets it), the failing one holds."""
    found = []
    for seconds in record.method.goals:
        shares = [
            (point.rate or 0.0, goal.share >= record.method.quantile)
            for point in record.points
            if point.kind == "open" and (goal := goal_of(point, seconds)) is not None
        ]
        fails = min((rate for rate, met in shares if not met), default=None)
        meets = max((rate for rate, met in shares if met and (fails is None or rate < fails)), default=None)
        found.append(Crossing(seconds, meets, fails))
    return found


def goal_of(point: Point, seconds: float) -> Goal | None:
    return next((goal for goal in point.goals if goal.seconds == seconds), None)
