"""The words between who keeps engines running (supervisor.py) and who sends requests to them
(replica_set.py): handed over by a call where both are one process, as lines of JSON where they are
two. A life is one process of a replica's, numbered over all of them. It knows words; no process, no
engine.
"""

from __future__ import annotations

import msgspec

from penstock.children.carried_error import CarriedError


class Join(msgspec.Struct, tag="join", frozen=True):
    """Down: an engine is about to start, and will look for you at this address."""

    replica: int
    life: int
    address: str


class Leave(msgspec.Struct, tag="leave", frozen=True):
    """Down: send it nothing more, and close once it has nothing of yours."""

    life: int


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """Down: its process has ended."""

    life: int
    code: int


class Joined(msgspec.Struct, tag="joined", frozen=True):
    """Up: it is ready, and requests go to it."""

    life: int


class JoinFailed(msgspec.Struct, tag="join_failed", frozen=True):
    """Up: it will never be ready, and why."""

    life: int
    error: CarriedError


class Hung(msgspec.Struct, tag="hung", frozen=True):
    """Up: it completes no step though it has work, and is to be killed. why: in a line."""

    life: int
    why: str


class RestartAll(msgspec.Struct, tag="restart_all", frozen=True):
    """Up: restart all replicas, one after the other."""


WordDown = Join | Leave | Ended
WordUp = Joined | JoinFailed | Hung | RestartAll
