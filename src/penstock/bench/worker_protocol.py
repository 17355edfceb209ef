"""What crosses between the load and its client processes: typed msgpack over a pair of sockets.

    load                      client
      Spec  ────────────────▶   its share of the asks
            ◀────────────────  Ready   connections are open
      Start ────────────────▶   the instant that is 0
            ◀────────────────  Progress    a few times a second
      Stop  ────────────────▶   when every process has what counts
            ◀────────────────  Result  a row a request

It knows no HTTP. Times are seconds; instants are of the monotonic clock that all processes of a
machine share.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import msgspec

from penstock.bench.endpoint import Endpoint
from penstock.children import frames


class PlannedRequest(msgspec.Struct, frozen=True, array_like=True):
    """intended: seconds from the point's begin; NaN in a closed loop, where a slot takes it when
    free. asked_*: -1 where no length is fixed. most_output: tokens of all samples together, at
    most; -1: nobody knows."""

    intended: float
    body: bytes
    asked_prompt: int
    asked_output: int
    most_output: int = -1


class Load(msgspec.Struct, frozen=True):
    """closed: slots in flight; None: an open loop, each ask at its time. stop_after, stall:
    seconds; what hasn't ended by then is unfinished, what hears no byte for so long is stalled.
    window: asks that are intended in it (first, end) count; once it is over and they have ended,
    the rest is cut."""

    asks: list[PlannedRequest]
    closed: int | None
    stop_after: float
    stall: float
    window: tuple[float, float]


class WorkerSpec(msgspec.Struct, tag=True):
    """A client process's share of a load. number: of each ask, in the whole. connections: to open
    beforehand."""

    target: Endpoint
    load: Load
    number: list[int]
    connections: int


class WorkerStart(msgspec.Struct, tag=True):
    begin: float


class WorkerStop(msgspec.Struct, tag=True):
    """Cut what is still in flight and come back."""


class WorkerReady(msgspec.Struct, tag=True):
    """Connections are open."""


class WorkerProgress(msgspec.Struct, tag=True):
    """Totals so far; failed: without the unfinished, which we cut off; firsts: first-token times
    (since the intended start) of requests that ended since the last news, 200 at most. waiting:
    requests of the window that have not ended, or might still come."""

    sent: int = 0
    ended: int = 0
    failed: int = 0
    unfinished: int = 0
    in_flight: int = 0
    events: int = 0
    output_tokens: int = 0
    waiting: int = 0
    firsts: list[float] = []


class RequestResult(msgspec.Struct, array_like=True):
    """What is known of a request when the point has ended: columns of its samples. number: of its
    ask, in the load. Instants since the point's begin; NaN: it did not get so far. gaps: float32,
    as bytes. Tokens by the server's usage; -1: it told none."""

    number: int
    intended: float
    actual: float
    first: float
    end: float
    events: int
    gaps: bytes
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    outcome: str


class WorkerResult(msgspec.Struct, tag=True):
    """One process's requests, but those that were never due.

    lags: how late each tick of the loop came, float32. late: how long after the intended start a
    request was taken up. troubles: outcome -> the first of its messages. cpu, wall: seconds of the
    point."""

    requests: list[RequestResult]
    late: bytes
    lags: bytes
    troubles: dict[str, str]
    cpu: float
    wall: float


Message = WorkerSpec | WorkerStart | WorkerStop | WorkerReady | WorkerProgress | WorkerResult
_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes | bytearray], Message] = msgspec.msgpack.Decoder(Message).decode


def send(channel: socket.socket, message: Message) -> None:
    """Raises BrokenPipeError or ConnectionResetError where the other side has gone."""
    frames.send(channel, _encode(message))


def receive(channel: socket.socket) -> Message | None:
    """Returns the next message, waiting for it; None when the other side has gone."""
    data = frames.receive(channel)
    return None if data is None else _decode(data)
