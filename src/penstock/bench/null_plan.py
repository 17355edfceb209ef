"""What a null server is told to do, and what it tells of what it did. It knows numbers and one file's form; it serves
nothing."""

from __future__ import annotations

import math
import random
import struct
from array import array
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

_HEAD = struct.Struct("<ddq")  # of a stamp: came, due, and how many instants follow


class Draw(msgspec.Struct, frozen=True):
    """Seconds. fixed: a. exponential: of mean a. lognormal: of median a, sigma b. uniform: from a to b."""

    kind: Literal["fixed", "exponential", "lognormal", "uniform"] = "fixed"
    a: float = 0.0
    b: float = 0.0

    def one(self, chance: random.Random) -> float:
        if self.kind == "fixed":
            return self.a
        if self.kind == "exponential":
            return chance.expovariate(1.0 / self.a)
        if self.kind == "uniform":
            return chance.uniform(self.a, self.b)
        return self.a * math.exp(self.b * chance.gauss(0.0, 1.0))


class NullPlan(msgspec.Struct):
    """first, gap: before the first event and between events. step: seconds between two events of every stream, all
    streams at the same instants (0: each by its own gap). stall_every, stall_for: nothing goes out in the last
    stall_for seconds of every stall_every since `zero`. stall_at: nothing goes out for stall_for seconds, once, from
    the moment that this many requests have come to a process. slots: requests that are served at once, others queue
    (0: no bound). lanes: so many queues of one server each; the prompt's first id modulo lanes tells which, and `first`
    is how long a request holds it up (0: none). tokens: of an answer whose body asks for none. stamps: a file that gets
    a Stamp for each answer."""

    first: Draw = Draw()
    gap: Draw = Draw()
    step: float = 0.0
    stall_every: float = 0.0
    stall_for: float = 0.0
    stall_at: int = 0
    slots: int = 0
    lanes: int = 0
    tokens: int = 16
    cached: int = 0
    seed: int = 0
    zero: float = 0.0
    host: str = "127.0.0.1"
    port: int = 0
    stamps: str = ""

    def released(self, due: float) -> float:
        """The instant at which what is due goes out: the end of the stall that it falls in, if it does."""
        if not self.stall_every:
            return due
        phase = (due - self.zero) % self.stall_every
        return due + self.stall_every - phase if phase >= self.stall_every - self.stall_for else due


class Stamp(NamedTuple):
    """One answer, by the server's own clock, which is the client's: time.monotonic(). came: its request had been read.
    due: its first event, by the plan. written: each event, when it was handed to the socket."""

    came: float
    due: float
    written: array[float]

    def packed(self) -> bytes:
        return _HEAD.pack(self.came, self.due, len(self.written)) + self.written.tobytes()


def read_stamps(path: Path) -> list[Stamp]:
    """What the processes of a plan have written, in the order in which answers were complete."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        came, due, count = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        found.append(Stamp(came, due, array("d", data[at : at + 8 * count])))
        at += 8 * count
    return found
