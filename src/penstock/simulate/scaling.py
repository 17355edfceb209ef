"""Scaling: a simulated autoscaler. It sets the number of replicas by the seconds that they need to
finish all known work (drain), as the autoscaler in deploy/ does.

    wanted = seconds of drain of all replicas / allowed seconds a replica, rounded up; at least 1
             while any request is open

Missing replicas are started at once and are up a cold start later. Replicas are removed only once
fewer were wanted for `idle` seconds; a removed replica gets no new requests and ends when it has
none left. Knows numbers; no replica.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Settings of the autoscaler. least, most: limits on the number of replicas. drain: seconds of
    known work per replica above which another is started. cold_start: seconds until a started
    replica takes requests. idle: a replica is removed once fewer were wanted for so many seconds.
    """

    least: int
    most: int
    drain: float = 10.0
    cold_start: float = 60.0
    idle: float = 300.0
    every: float = 1.0  # seconds between two adjustments of the number of replicas


@dataclass(slots=True)
class FleetChange:
    """Replicas whose state the latest adjustment changed."""

    came_up: list[int] = field(default_factory=list)
    went_down: list[int] = field(default_factory=list)


class Scaler:
    """The state of `count` replicas: off, starting, up, or leaving."""

    def __init__(self, scaling: Scaling, count: int) -> None:
        self._scaling = scaling
        self.up: list[int] = []  # replicas that take requests
        self.counts: list[tuple[float, int]] = []
        self.next_look = 0.0
        self._off = list(range(count - 1, -1, -1))
        self._starting: list[tuple[float, int]] = []  # (time at which it will be up, replica)
        self._leaving: list[int] = []
        self._since: dict[int, float] = {}  # start time of each replica that is not off
        self._seconds = 0.0  # seconds for which replicas were up that are off again, summed
        # (time, wanted number of replicas) of the last `idle` seconds
        self._wanted: deque[tuple[float, int]] = deque()

    def look(self, now: float, drain: float, opened: bool, free: Sequence[int]) -> FleetChange:
        """Starts or removes replicas to reach the wanted number; returns the changes. drain:
        seconds of known work, summed over the replicas that are up. opened: True if any request is
        open. free: replicas without requests."""
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
            # The minimum of replicas has been up since before the first request.
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
        """Returns the total seconds of replicas being up, starting or leaving."""
        return self._seconds + sum(max(0.0, now - since) for since in self._since.values())

    def _end(self, number: int, now: float) -> None:
        self._leaving.remove(number)
        self._seconds += now - self._since.pop(number)
        self._off.append(number)
