"""Scaling: how many replicas are up, by the work there is: as an autoscaler on seconds of drain has
it (deploy/).

    wanted = seconds of drain of all replicas / those that one may have, rounded up; 1 while
    anything is open

More are started at once and are up a cold start later; fewer are left only once fewer have been
wanted for as long as `idle`. One that is left gets nothing new, and ends when what it has is done.
It knows numbers; no replica.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """least, most: replicas.   drain: seconds of work that one may have before there is another.
    cold_start: seconds until one that is started takes requests.   idle: seconds that fewer must
    have been wanted."""

    least: int
    most: int
    drain: float = 10.0
    cold_start: float = 60.0
    idle: float = 300.0
    every: float = 1.0  # seconds between looks


@dataclass(slots=True)
class FleetChange:
    """Replicas whose state a look has changed."""

    came_up: list[int] = field(default_factory=list)
    went_down: list[int] = field(default_factory=list)


class Scaler:
    """The state of `count` replicas: off, starting, up, or leaving."""

    def __init__(self, scaling: Scaling, count: int) -> None:
        self._scaling = scaling
        self.up: list[int] = []  # that take requests
        self.counts: list[tuple[float, int]] = []
        self.next_look = 0.0
        self._off = list(range(count - 1, -1, -1))
        self._starting: list[tuple[float, int]] = []  # when it is up
        self._leaving: list[int] = []
        self._since: dict[int, float] = {}  # of each that isn't off
        self._seconds = 0.0  # of those that are off again
        self._wanted: deque[tuple[float, int]] = deque()  # of the last `idle` seconds

    def look(self, now: float, drain: float, opened: bool, free: Sequence[int]) -> FleetChange:
        """Brings the replicas to what is wanted. drain: seconds, of all that are up.   opened:
        whether any request is open.   free: replicas that have none."""
        how, change = self._scaling, FleetChange()
        self.next_look = now + how.every
        change.came_up = [number for when, number in self._starting if when <= now]
        self._starting = [each for each in self._starting if each[0] > now]
        self.up += change.came_up
        for number in [each for each in self._leaving if each in free]:
            self._end(number, now)
        wanted = min(how.most, max(how.least, math.ceil(drain / how.drain), int(opened)))
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - how.idle:
            self._wanted.popleft()
        there = len(self.up) + len(self._starting)
        for _ in range(min(wanted - there, len(self._off))):
            number = self._off.pop()
            self._since[number] = now
            # Those that are always there have been there before the first request.
            self._starting.append(
                (now if not self.counts and there < how.least else now + how.cold_start, number)
            )
        keep = max(number for _, number in self._wanted)
        if len(self.up) > keep and self._wanted[0][0] <= now - how.idle + how.every:
            change.went_down = sorted(self.up, key=lambda each: each not in free)[
                : len(self.up) - keep
            ]
            self.up = [each for each in self.up if each not in change.went_down]
            self._leaving += change.went_down
            for number in [each for each in change.went_down if each in free]:
                self._end(number, now)
        if not self.counts or self.counts[-1][1] != len(self._since):
            self.counts.append((now, len(self._since)))
        return change

    def up_seconds(self, now: float) -> float:
        """Returns the seconds that replicas were up, starting or leaving, all together."""
        return self._seconds + sum(max(0.0, now - since) for since in self._since.values())

    def _end(self, number: int, now: float) -> None:
        self._leaving.remove(number)
        self._seconds += now - self._since.pop(number)
        self._off.append(number)
