"""What a record says of each goal: the rate up to which first tokens come in time. And what was offered, and which
rates are lower bounds. It knows records alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.almanac.figures import kept_of, most_of, shows_nothing, sustained
from penstock.almanac.record import Goal, Point, Record

RANKED = " and can be ranked"


@dataclass(frozen=True, slots=True)
class Crossing:
    """Requests a second, as `kept_of` has them. meets: the highest rate that keeps the goal; None: none does. fails:
    what was offered where it was missed first; None: nowhere. keeps, misses: between them the crossing surely lies (by
    the 95 % intervals). barred: what was offered where the client was short: tried, but it says nothing of the server.
    unserved: where nothing was served: tried, and neither kept nor missed."""

    seconds: float
    meets: float | None
    fails: float | None
    keeps: float | None
    misses: float | None
    barred: tuple[float, ...] = ()
    unserved: tuple[float, ...] = ()

    def words(self, quantile: float) -> str:
        what = f"first token within {self.seconds:g} s for {100 * quantile:g} % of the requests"
        if self.meets is None:
            return f"{what}: {self.none}"
        kept = f"{what}: up to {in_three(self.meets)} requests a second"
        if self.fails is not None:
            return f"{kept}, missed where {in_three(self.fails)} were offered"
        beyond = RANKED if any(rate > self.meets for rate in self.barred) else ""
        return f"{kept}, missed at no higher rate that was tried{beyond}"

    @property
    def none(self) -> str:
        """Returns why there is no rate that keeps it, where there is none."""
        if self.fails is None and self.unserved:
            return f"tried at {listed(self.unserved)} a second, and nothing was served in that window"
        if self.fails is None:
            return "no rate that was tried can be ranked" if self.barred else "no rate was tried"
        below = RANKED if any(rate < self.fails for rate in self.barred) else ""
        return f"missed at {in_three(self.fails)} a second, the lowest rate that was tried{below}"


def crossings(record: Record) -> list[Crossing]:
    """Returns the crossing of each goal, by the open points. One whose client was short says nothing of the server."""
    tried = [point for point in record.points if point.kind == "open" and point.rate is not None]
    barred = tuple(offered(point) for point in tried if point.client.short)
    ranked = [point for point in tried if not point.client.short]
    most = most_of(record.points)
    return [_crossing(ranked, seconds, record.method.quantile, most, barred) for seconds in record.method.goals]


def _crossing(
    points: Sequence[Point], seconds: float, quantile: float, most: float | None, barred: tuple[float, ...]
) -> Crossing:
    goals = [(point, goal_of(point, seconds)) for point in points]
    line = [(sustained(point), goal) for point, goal in goals if goal is not None]
    kept = kept_of(line, quantile, most)
    unserved = tuple(here.offered for here, goal in line if shows_nothing(here, goal, quantile))
    return Crossing(seconds, kept.rate, kept.missed, keeps=kept.low, misses=kept.high, barred=barred, unserved=unserved)


def goal_of(point: Point, seconds: float) -> Goal | None:
    return next((goal for goal in point.goals if goal.seconds == seconds), None)


def listed(rates: Sequence[float]) -> str:
    return ", ".join(in_three(rate) for rate in sorted(rates))


def in_three(rate: float) -> str:
    """Returns three digits, and no power of ten behind them."""
    return f"{float(f'{rate:.3g}'):g}"


def offered(point: Point) -> float:
    """Returns requests a second that an open point's window issued; 0 for one of another kind, which offers none."""
    return sustained(point).offered if point.kind == "open" and point.rate is not None else 0.0


def cut_off(point: Point) -> bool:
    """Returns whether the point ran to its time limit and not to its end, so that its rates are lower bounds. (Where a
    steady window is open, what the point's end cuts off is in its rates.)"""
    return point.opens is None and point.outcomes.get("unfinished", 0) > 0
