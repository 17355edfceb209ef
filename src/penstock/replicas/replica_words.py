"""replica_words: messages between supervisor and fronts. The supervisor (supervisor.py) starts
engines. A front is a ReplicaSet (replica_set.py), in this process or a server process, which sends
requests to the engines. Messages are passed by a call within one process, as lines of JSON between
two. A life is one process of a replica, from start to end; lives are numbered over all replicas.
Knows messages; no process, no engine.
"""

from __future__ import annotations

import msgspec

from penstock.children.carried_error import CarriedError


class Join(msgspec.Struct, tag="join", frozen=True):
    """Message to a front: an engine will start, and connect to the front at this address."""

    replica: int
    life: int
    address: str


class Leave(msgspec.Struct, tag="leave", frozen=True):
    """Message to fronts: send this engine process (life) no more requests, and close the connection
    once none of the front's requests is open there."""

    life: int


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """Message to fronts: an engine process (life) has ended."""

    life: int
    code: int


class Joined(msgspec.Struct, tag="joined", frozen=True):
    """Message from a front: it has connected to this engine process (life) and
    sends it requests."""

    life: int


class JoinFailed(msgspec.Struct, tag="join_failed", frozen=True):
    """Message from a front: it could not connect to this engine process (life), and why."""

    life: int
    error: CarriedError


class Hung(msgspec.Struct, tag="hung", frozen=True):
    """Message from a front: kill this engine, which has work but completes no step. why: one
    line."""

    life: int
    why: str


class RestartAll(msgspec.Struct, tag="restart_all", frozen=True):
    """Message from a front: restart all replicas, one after the other."""


WordDown = Join | Leave | Ended
WordUp = Joined | JoinFailed | Hung | RestartAll
