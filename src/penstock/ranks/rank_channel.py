"""RankChannel: what rank 0 and the process of another rank say to each other, over a pair of
sockets that they alone hold. It knows the words and their bytes, never pickled; no models and no
devices.

    down    RankStart | Limits, as all ranks have agreed | a plan for each step, and LateMasks
    behind it
                  where it draws late (children/array_codec.py) | RankOrder between steps
    up      RankLimits | RankDrew for each step | RankDone for each order | CarriedError, last: why
    it ends
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import zlib
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from penstock.children import frames
from penstock.children.array_codec import ArrayCodec
from penstock.children.carried_error import CarriedError
from penstock.config import Config
from penstock.execute.limits import Limits
from penstock.schedule.step import JOIN_RECORD, LateMasks, StepPlan, StepTokens
from penstock.shared_weights import SharedWeights, WeightsSource

_BUFFER = 1 << 20  # bytes that a sender need not wait for: several plans of thousands of rows


class RankStart(msgspec.Struct, frozen=True):
    """Down, first: which rank this is, of which model, and all that it must not find out by itself.

    meeting: the file where ranks meet.   threads: of each rank's products, whose last bits may
    depend on it. seconds: the longest that a rank waits for another.
    """

    rank: int
    size: int
    folder: str
    knobs: dict[str, Any]
    meeting: str
    threads: int
    seconds: float
    tuned: dict[str, Any] = {}
    kv_scales: dict[str, tuple[list[float], list[float]]] = {}
    end_of_text: int | None = None

    def config(self) -> Config:
        """Returns rank 0's, an artifact's numbers in it."""
        made = Config.of(**self.knobs)
        made.tuned, made.kv_scales, made.end_of_text = self.tuned, self.kv_scales, self.end_of_text
        return made


class RankLimits(msgspec.Struct, tag="limits", frozen=True):
    """Up, once: the weights are loaded, and this is what the rank has room for."""

    limits: Limits


class RankDrew(msgspec.Struct, tag="drew", frozen=True):
    """Up, after each step: a checksum of its tokens, which are the same on every rank, and its
    runner's counts."""

    number: int
    checksum: int
    counts: dict[str, int] = {}


class RankOrder(msgspec.Struct, frozen=True):
    """Down, between two steps: have weights loaded beside the model's (`load`, of a folder or of
    another process), put in their place (`take`), or let go (`forget`)."""

    what: Literal["load", "take", "forget"]
    folder: str = ""
    shared: SharedWeights | None = None

    @classmethod
    def load(cls, source: WeightsSource) -> RankOrder:
        return cls("load", str(source)) if isinstance(source, Path) else cls("load", shared=source)

    @property
    def source(self) -> WeightsSource:
        return Path(self.folder) if self.shared is None else self.shared


class RankDone(msgspec.Struct, tag="done", frozen=True):
    """Up: an order is carried out, or why not; then nothing has changed."""

    refused: CarriedError | None = None


PLANS: ArrayCodec[StepPlan] = ArrayCodec(StepPlan, "a step's plan", JOIN_RECORD)
LATE_MASKS: ArrayCodec[LateMasks] = ArrayCodec(LateMasks, "a step's late masks")
RankWord = RankLimits | RankDrew | RankDone | CarriedError
encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(RankStart).decode
decode_limits = msgspec.msgpack.Decoder(Limits).decode
_decode_order = msgspec.msgpack.Decoder(RankOrder).decode
decode_word = msgspec.msgpack.Decoder[RankWord](RankWord).decode


_ORDER = 0xC1  # the one byte that no msgpack begins with: a plan never does


def encode_order(order: RankOrder) -> bytes:
    return bytes([_ORDER]) + encode(order)


def decode_order(data: bytearray) -> RankOrder | None:
    """Returns what is ordered; None where it is a plan."""
    return _decode_order(memoryview(data)[1:]) if data[0] == _ORDER else None


def checksum(tokens: StepTokens) -> int:
    """Returns a number that other tokens hardly have."""
    return zlib.crc32(np.ascontiguousarray(tokens.tokens).data)


class RankChannel:
    """One end. When a process has gone, however it went, the other's receive() gives None. seconds:
    the longest that a sender waits for room."""

    def __init__(self, end: socket.socket, seconds: float) -> None:
        self._socket, self._sending = end, threading.Lock()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        wait = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        # a timeout of Python's would be receive()'s too
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)

    def send(self, data: bytes | bytearray) -> None:
        """Raises OSError where nobody takes it."""
        with self._sending:
            frames.send(self._socket, data)

    def comes(self, seconds: float) -> bool:
        """Returns whether receive() has something to begin with, now or within so many seconds: the
        end is something too."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))

    def receive(self) -> bytearray | None:
        """Waits for a message; None: the other end has gone, or this one was closed."""
        return frames.receive(self._socket)

    def hang_up(self) -> None:
        """Ends the talk at both ends; whoever waits in receive() is let go."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other has gone

    def close(self) -> None:
        """Gives the descriptor back, when nobody waits any more."""
        self._socket.close()
