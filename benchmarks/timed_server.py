"""A null server with random, recorded times, as a reference for a client's figures.

Run as `python benchmarks/timed_server.py`. First tokens and gaps come from given distributions, one
stall is known, and a file records the times. Its timers have millisecond resolution: a drawn time
is kept to about 1 ms.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import struct
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from penstock.bench.null_server import (
    EVENT,
    HEAD,
    NullRequest,
    NullServer,
    NullVisit,
    StepClock,
    ending,
    run_process,
)

_STAMP = struct.Struct("<ddq")  # came, due, and how many instants follow


class Draw(msgspec.Struct, frozen=True):
    """A time in seconds. fixed: a. exponential: of mean a. lognormal: of median a, sigma b."""

    kind: Literal["fixed", "exponential", "lognormal"] = "fixed"
    a: float = 0.0
    b: float = 0.0

    def one(self, chance: random.Random) -> float:
        if self.kind == "exponential":
            return chance.expovariate(1.0 / self.a)
        return (
            self.a * math.exp(self.b * chance.gauss(0.0, 1.0))
            if self.kind == "lognormal"
            else self.a
        )


class TimedPlan(msgspec.Struct):
    """The server's times. first, gap: seconds before the first event and between events. stall_at:
    once this many requests have come to a process, nothing is sent for stall_for seconds, once.
    stamps: a file that gets a Stamp for each answer.
    """

    first: Draw = Draw()
    gap: Draw = Draw()
    stall_at: int = 0
    stall_for: float = 0.0
    seed: int = 0
    stamps: str = ""


class Stamp(NamedTuple):
    """One answer's times, on time.monotonic(), which the client shares. came: its request was read.
    due: planned time of its first event. written: the time at which each event was handed to the
    socket."""

    came: float
    due: float
    written: array[float]


def read_stamps(path: Path) -> list[Stamp]:
    """Returns the stamps that a plan's processes have written, in the order in which answers were
    complete."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        came, due, count = _STAMP.unpack_from(data, at)
        at += _STAMP.size
        found.append(Stamp(came, due, array("d", data[at : at + 8 * count])))
        at += 8 * count
    return found


def timed_server(plan: TimedPlan, processes: int = 1) -> NullServer:
    """Returns the server of a plan, to be entered as a context."""
    return NullServer(plan, processes, words=[__file__])


class _Timing:
    """State that a process's connections share: the plan, the random generator, the stall."""

    def __init__(self, plan: TimedPlan, number: str) -> None:
        self.plan = plan
        self.chance = random.Random(f"{plan.seed}/{number}")
        self.stamps = (
            os.open(plan.stamps, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            if plan.stamps
            else None
        )
        self._came = 0
        self._stall = (0.0, 0.0)

    def due(self, now: float) -> float:
        """Returns the time of the first event of a request that arrives now."""
        self._came += 1
        if self._came == self.plan.stall_at:
            self._stall = (now, now + self.plan.stall_for)
        return now + self.plan.first.one(self.chance)

    async def until(self, due: float) -> float:
        """Waits until an event may be sent. Returns its planned time: `due`, or the end of the
        stall."""
        while True:
            begin, end = self._stall  # one may have begun in the meantime
            due = max(due, end) if begin <= max(due, time.monotonic()) < end else due
            wait = due - time.monotonic()
            if wait <= 0.0005:
                return due
            await asyncio.sleep(wait)


class _TimedVisit(NullVisit):
    def __init__(self, timing: _Timing) -> None:
        super().__init__(StepClock(0.0))
        self._timing = timing
        self._speaks: asyncio.Task[None] | None = None

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if self._speaks is not None:
            self._speaks.cancel()

    def answer(self, asked: NullRequest, came: float) -> None:
        due = self._timing.due(came)
        self._speaks = asyncio.get_running_loop().create_task(self._speak(asked, came, due))

    async def _speak(self, asked: NullRequest, came: float, due: float) -> None:
        """Sends each event when it is due. Stamps it before, because the client may receive it
        before the write returns."""
        first, written, timing = due, array("d"), self._timing
        for left in reversed(range(asked.max_tokens)):
            due = await timing.until(due)
            if not written:
                first = due
                self.write(HEAD)
            written.append(time.monotonic())
            if left:
                self.write(EVENT)
                due += timing.plan.gap.one(timing.chance)
            elif timing.stamps is not None:
                os.write(timing.stamps, _STAMP.pack(came, first, len(written)) + written.tobytes())
        self.write(ending(asked))


def _visits(plan: str, number: str) -> Callable[[], NullVisit]:
    timing = _Timing(msgspec.json.decode(plan, type=TimedPlan), number)
    return lambda: _TimedVisit(timing)


if __name__ == "__main__":
    sys.exit(run_process(_visits))
