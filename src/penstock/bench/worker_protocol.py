"""Messages between the bench and its client processes. They are typed msgpack over a pair of
sockets.

    load                      client
      Spec  ────────────────▶   its share of the requests
            ◀────────────────  Ready   connections are open
      Start ────────────────▶   the instant that counts as 0
            ◀────────────────  Progress    a few times a second
      Stop  ────────────────▶   once every process has what counts
            ◀────────────────  Result  a row a request

Knows no HTTP. Times are seconds; instants are on the monotonic clock that all processes of a
machine share.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import msgspec

from penstock.bench.endpoint import Endpoint
from penstock.children import frames


class PlannedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request and its time. intended: seconds from the load level's begin; NaN in a closed loop,
    where a free slot takes it. asked_*: requested tokens; -1: no fixed length. most_output: most
    tokens of all samples together; -1: unknown.
    """

    intended: float
    body: bytes
    asked_prompt: int
    asked_output: int
    most_output: int = -1


class Load(msgspec.Struct, frozen=True):
    """A list of requests and how to send them. closed: number of slots; None: an open loop, each
    request at its time. stop_after: seconds until running requests count as unfinished. stall:
    seconds of silence after which a request counts as stalled. window: (first, end) of the intended
    starts that count; once it is over and its requests have ended, the rest is cut off.
    """

    asks: list[PlannedRequest]
    closed: int | None
    stop_after: float
    stall: float
    window: tuple[float, float]


class WorkerSpec(msgspec.Struct, tag=True):
    """A client process's share of a load. number: each request's index in the whole load.
    connections: number to open in advance."""

    target: Endpoint
    load: Load
    number: list[int]
    connections: int


class WorkerStart(msgspec.Struct, tag=True):
    begin: float


class WorkerStop(msgspec.Struct, tag=True):
    """Tells a worker to cut off running requests and return its result."""


class WorkerReady(msgspec.Struct, tag=True):
    """Tells the parent that the connections are open."""


class WorkerProgress(msgspec.Struct, tag=True):
    """Counts since the load level began. failed: failed requests, without those that the load
    level's end cut off. firsts: first-token times (since the intended start) of requests that ended
    since the last message, 200 at most. waiting: requests of the window that have not ended or may
    still come.
    """

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
    """The result of a request at the end of a point: a row of its samples. number: the request's
    index in the load. Instants are seconds since the load level's begin; NaN: not reached. gaps:
    float32, as bytes. Tokens are the server's usage; -1: not given.
    """

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
    """The results of one process's requests; requests that were never sent are left out.

    lags: lateness of each tick of the event loop, float32 seconds. late: seconds from a request's
    intended start until it was taken up, float32. troubles: outcome -> its first message. cpu,
    wall: seconds of the load level.
    """

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
    """Sends a message. Raises BrokenPipeError or ConnectionResetError if the other side is gone."""
    frames.send(channel, _encode(message))


def receive(channel: socket.socket) -> Message | None:
    """Waits for the next message and returns it; None when the other side is gone."""
    data = frames.receive(channel)
    return None if data is None else _decode(data)
