"""The channel: how requests go down to an engine in another process, and how its news come up.

Typed msgpack over ZeroMQ (a PAIR over ipc): a tag, a struct, and arrays as raw bytes with their dtype and shape. Never
pickle. In-process users (llm.py) call the engine directly and need none of this. It knows the
words that cross; neither scheduling nor text.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from penstock.engine.engine import Refused
from penstock.engine.open import EngineFacts
from penstock.request import Request
from penstock.schedule.deltas import Deltas

ARRAY = 1  # the msgpack extension code of a numpy array
_HEAD = struct.Struct("<cBHiii")


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """Down: a request."""

    request: Request


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Down: end a request, or one sample of it."""

    request_id: int
    sample: int | None


class Close(msgspec.Struct, tag="close", frozen=True):
    """Down: end."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Up, once: the engine is loaded."""

    facts: EngineFacts


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """Up, last: the engine ends, and why. `kind` is the error's class name."""

    kind: str
    message: str
    param: str | None


class News(msgspec.Struct, tag="news", frozen=True):
    """Up: what one step brought, and the engine's stats now and then."""

    deltas: Deltas | None
    refused: list[Refused]
    stats: dict[str, float] | None


Down = Ask | Cancel | Close
Up = Ready | Failed | News


def _pack(value: Any) -> Any:
    """An array: dtype character, dimensions' count, two bytes' room, three dimensions of four bytes, then its bytes."""
    if isinstance(value, np.ndarray):
        if value.ndim > 3 or value.dtype.kind not in "biuf" or not value.dtype.isnative:
            raise NotImplementedError(
                f"an array of {value.dtype} and {value.ndim} dimensions doesn't cross the channel"
            )
        shape = (*value.shape, 0, 0, 0)[:3]
        head = _HEAD.pack(value.dtype.char.encode(), value.ndim, 0, *shape)
        return msgspec.msgpack.Ext(ARRAY, head + np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} doesn't cross the channel")


def _unpack(code: int, data: memoryview) -> np.ndarray[Any, Any]:
    if code != ARRAY:
        raise ValueError(f"extension {code} is not of this channel")
    char, dimensions, _, *shape = _HEAD.unpack_from(data)
    return np.frombuffer(data, char.decode(), offset=_HEAD.size).reshape(shape[:dimensions])


def _as_is(_: type, value: Any) -> Any:
    return value


class Wire:
    """Words to bytes and back, for one end of the channel."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
        self._down = msgspec.msgpack.Decoder(Down, ext_hook=_unpack, dec_hook=_as_is)
        self._up = msgspec.msgpack.Decoder(Up, ext_hook=_unpack, dec_hook=_as_is)

    def encode(self, word: Down | Up) -> bytes:
        return self._encoder.encode(word)

    def down(self, data: bytes) -> Down:
        word: Down = self._down.decode(data)
        return word

    def up(self, data: bytes) -> Up:
        word: Up = self._up.decode(data)
        return word


class EngineEnd:
    """The engine's end: where requests arrive and news leaves."""

    def __init__(self, address: str) -> None:
        self._wire = Wire()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.connect(address)

    def receive(self, wait_ms: int) -> list[Down]:
        """All words that are here; waits for the first for at most `wait_ms` (-1: for ever)."""
        words: list[Down] = []
        while self._socket.poll(wait_ms if not words else 0):
            words.append(self._wire.down(self._socket.recv()))
        return words

    def send_up(self, word: Up) -> None:
        self._socket.send(self._wire.encode(word), copy=False)

    def close(self) -> None:
        self._socket.close(linger=1000)
        self._context.term()


class ClientEnd:
    """The client's end, for an asyncio loop."""

    def __init__(self, address: str) -> None:
        self._wire = Wire()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(address)

    def send_down(self, word: Down) -> None:
        """Queues a word; never waits (the queue has no bound: what is admitted is bounded above it).

        Through the asyncio socket, not through a shadow of it: a send takes the descriptor's one wake-up, and only the
        asyncio socket then looks for itself whether news has come. (Through a shadow, bursts left `receive` asleep.)
        """
        sent = asyncio.ensure_future(self._socket.send(self._wire.encode(word)))
        if sent.done():
            sent.result()  # raises what went wrong at once; else it goes out in its turn

    async def receive(self) -> Up:
        return self._wire.up(await self._socket.recv())

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
