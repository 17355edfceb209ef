"""What crosses between the load and its client processes: typed msgpack in frames, over stdin and stdout.

    load                      client
      Spec  ────────────────▶   its share of the asks
            ◀────────────────  Ready   connections are open
      Go    ────────────────▶   the instant that is 0
            ◀────────────────  News    a few times a second
      Stop  ────────────────▶   when every process has what counts
            ◀────────────────  Part    columns

It knows no HTTP. Times are seconds; instants are of the monotonic clock that all processes of a machine share.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec

_LENGTH = struct.Struct("<Q")


class WorkerSpec(msgspec.Struct, tag=True):
    """What a client process does. Columns have an entry an ask; `intended` is NaN where a slot takes it when free.

    head: all of the request's head but its length. window: asks that were intended in it count (first, end)."""

    host: str
    port: int
    tls: bool
    head: bytes
    connections: int
    closed: int | None
    stop_after: float
    stall: float
    window: tuple[float, float]
    number: list[int]
    intended: list[float]
    body: list[bytes]
    asked_prompt: list[int]
    asked_output: list[int]
    most_output: list[int]


class WorkerStart(msgspec.Struct, tag=True):
    begin: float


class WorkerStop(msgspec.Struct, tag=True):
    """Cut what is still in flight and come back."""


class WorkerReady(msgspec.Struct, tag=True):
    connections: int


class WorkerProgress(msgspec.Struct, tag=True):
    """Totals so far; failed: without the unfinished, which we cut off; firsts: first-token times (since the intended
    start) of requests that ended since the last news, 200 at most. waiting: requests of the window that have not ended,
    or might still come."""

    sent: int
    ended: int
    failed: int
    unfinished: int
    in_flight: int
    events: int
    output_tokens: int
    firsts: list[float]
    waiting: int


class WorkerResult(msgspec.Struct, tag=True):
    """One process's requests; columns as raw bytes: float64, int32, and for gaps float32 of all requests in turn.

    lags: how late each tick of the loop came, float32. late: how long after the intended start a request was taken up.
    troubles: outcome -> the first of its messages. cpu, wall: seconds of the point."""

    number: bytes
    intended: bytes
    actual: bytes
    first: bytes
    end: bytes
    events: bytes
    gaps: bytes
    prompt_tokens: bytes
    output_tokens: bytes
    cached_tokens: bytes
    outcome: list[str]
    late: bytes
    lags: bytes
    troubles: dict[str, str]
    again: int
    cpu: float
    wall: float


Message = WorkerSpec | WorkerStart | WorkerStop | WorkerReady | WorkerProgress | WorkerResult
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def pack(message: Message) -> bytes:
    data = _encode(message)
    return _LENGTH.pack(len(data)) + data


def read(file: BinaryIO) -> Message | None:
    """Returns the next message, waiting for it; None when the other side has gone."""
    head = _read(file, _LENGTH.size)
    data = _read(file, _LENGTH.unpack(head)[0]) if head is not None else None
    return None if data is None else _decode(data)


def _read(file: BinaryIO, size: int) -> bytes | None:
    """Returns all of it, for a raw file gives what it has."""
    data = bytearray()
    while len(data) < size:
        piece = file.read(size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)
