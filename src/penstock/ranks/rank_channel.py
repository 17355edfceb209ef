"""RankChannel: messages between rank 0 and another rank. They travel over a private socket pair.
Knows the messages and their bytes, never pickled; no models and no devices.

    down    RankStart | Limits common to all ranks | a plan per step, followed by LateMasks if it
            draws late (children/array_codec.py) | RankOrder between steps
    up      RankLimits | RankDrew per step | RankDone per order | CarriedError, last: why it ends
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

# size of the socket's buffer in bytes: a sender need not wait until the receiver reads. Fits
# several plans of thousands of rows
_BUFFER = 1 << 20


class RankStart(msgspec.Struct, frozen=True):
    """Down, first message: the rank's number, its model, and all values that must equal rank 0's.

    meeting: path of the file by which the ranks find each other. threads: torch's threads per rank;
    the last bits of products may depend on it. seconds: timeout for other ranks.
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
        """Returns rank 0's config, including values from a built engine."""
        made = Config.of(**self.knobs)
        made.tuned, made.kv_scales, made.end_of_text = self.tuned, self.kv_scales, self.end_of_text
        return made


class RankLimits(msgspec.Struct, tag="limits", frozen=True):
    """Up, once: the weights are loaded, and these are the rank's own limits."""

    limits: Limits


class RankDrew(msgspec.Struct, tag="drew", frozen=True):
    """Up, after each step: a checksum of its tokens, to be compared across ranks, and the runner's
    counts."""

    number: int
    checksum: int
    counts: dict[str, int] = {}


class RankOrder(msgspec.Struct, frozen=True):
    """Down, between two steps: load weights beside the model's (`load`, from a folder or another
    process), swap them in (`take`), or drop them (`forget`)."""

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
    """Up: an order is done, or was refused and why; a refused order changes nothing."""

    refused: CarriedError | None = None


PLANS: ArrayCodec[StepPlan] = ArrayCodec(StepPlan, "a step's plan", JOIN_RECORD)
LATE_MASKS: ArrayCodec[LateMasks] = ArrayCodec(LateMasks, "a step's late masks")
RankWord = RankLimits | RankDrew | RankDone | CarriedError
encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(RankStart).decode
decode_limits = msgspec.msgpack.Decoder(Limits).decode
_decode_order = msgspec.msgpack.Decoder(RankOrder).decode
decode_word = msgspec.msgpack.Decoder[RankWord](RankWord).decode


_ORDER = 0xC1  # first byte of an order; no msgpack message begins with it, so no plan does


def encode_order(order: RankOrder) -> bytes:
    return bytes([_ORDER]) + encode(order)


def decode_order(data: bytearray) -> RankOrder | None:
    """Returns the order; None if the message is a plan."""
    return _decode_order(memoryview(data)[1:]) if data[0] == _ORDER else None


def checksum(tokens: StepTokens) -> int:
    """Returns a checksum of the tokens that a step drew."""
    return zlib.crc32(np.ascontiguousarray(tokens.tokens).data)


class RankChannel:
    """One end of the channel. When the other process has gone, receive() returns None. seconds:
    timeout of a sender waiting for room."""

    def __init__(self, end: socket.socket, seconds: float) -> None:
        self._socket, self._sending = end, threading.Lock()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        wait = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        # set in the kernel: a timeout of Python's socket would also apply to receive()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)

    def send(self, data: bytes | bytearray) -> None:
        """Sends a message. Raises OSError if the other end is gone or does not read."""
        with self._sending:
            frames.send(self._socket, data)

    def comes(self, seconds: float) -> bool:
        """Returns True if receive() has data or the end of the stream to read, now or within
        `seconds`."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))

    def receive(self) -> bytearray | None:
        """Waits for a message; None: the other end has gone, or hung up."""
        return frames.receive(self._socket)

    def hang_up(self) -> None:
        """Shuts both directions down; a waiting receive() returns."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end has gone

    def close(self) -> None:
        """Closes the descriptor, once no thread uses it."""
        self._socket.close()
