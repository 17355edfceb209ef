"""Channel: messages between clients and an engine process.

Typed msgpack (children/array_codec.py) over ZeroMQ, one PAIR socket over ipc per client. Each
client numbers its own requests; the engine's end maps these numbers to ids of its own, sends each
client only its own deltas, and notices when a client has gone. In-process users (`llm`) call the
engine directly and need no channel. Knows the messages; neither scheduling nor text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.children.array_codec import ArrayCodec
from penstock.children.carried_error import CarriedError
from penstock.engine.build_engine import EngineFacts
from penstock.engine.client_ids import ClientIds
from penstock.engine.control import Control, Controlled, Weights
from penstock.engine.engine import Refused
from penstock.request import Request
from penstock.schedule.deltas import Deltas


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """Message to the engine: run this request."""

    request: Request


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Message to the engine: end a request, or one sample of it."""

    request_id: int
    sample: int | None


class Close(msgspec.Struct, tag="close", frozen=True):
    """Message to the engine, the last: the client closes. The engine ends with its last client."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Message from the engine, sent once: it has loaded its model."""

    facts: EngineFacts


class StepOutputs(msgspec.Struct, tag="news", frozen=True):
    """Message from the engine: the deltas of one step, and now and then the engine's stats. heard:
    number of this client's requests that the stats include."""

    deltas: Deltas | None
    refused: list[Refused]
    stats: dict[str, float] | None
    heard: int = 0


class GoesOn(msgspec.Struct, tag="goes on", frozen=True):
    """Message from the engine: a long step is still running, and a layer has completed."""


Down = Ask | Cancel | Close | Control
Up = Ready | CarriedError | StepOutputs | GoesOn | Controlled | Weights


# undecodable bytes come from a broken peer or a process that is no part of this engine
_WHAT = "a message between server and engine"
DOWN: ArrayCodec[Down] = ArrayCodec(Down, _WHAT)
UP: ArrayCodec[Up] = ArrayCodec(Up, _WHAT)


@dataclass(frozen=True, slots=True)
class Left:
    """Event that receive() returns at the engine's end: a client has closed, or its process has
    gone."""

    client: int


@dataclass(frozen=True, slots=True)
class ControlOf:
    """Event that receive() returns at the engine's end: a client asks for a control command."""

    client: int
    control: Control


Heard = Ask | Cancel | Left | ControlOf


class EngineEnd:
    """The engine's end: receives requests and sends deltas. A client is identified by its index in
    `addresses`."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        # socket -> client; includes each client's monitor socket, which reports its disconnect
        self._clients: dict[zmq.Socket[bytes], int] = {}
        self.owners = ClientIds(len(addresses))
        self._heard = [0] * len(addresses)  # number of requests received from each client
        for client, address in enumerate(addresses):
            self._connect(client, address)

    @property
    def clients(self) -> int:
        """Returns the number of clients that have not left."""
        return len(self._sockets)

    def receive(self, wait_ms: int) -> list[Heard]:
        """Returns all messages that have arrived; waits at most `wait_ms` for the first (-1: no
        limit). Raises EngineError."""
        words: list[Heard] = []
        while found := self._poller.poll(wait_ms if not words else 0):
            for socket, _ in found:
                client = self._clients.get(socket)
                if client is not None:  # None: the client left a moment ago
                    words += self._hear(client, socket)
        return words

    def send_up(self, word: Up) -> None:
        """Sends a message to all clients. Each client gets only its own requests' part of
        StepOutputs."""
        if not isinstance(word, StepOutputs) or self.owners.count == 1:
            if isinstance(word, StepOutputs):
                word = msgspec.structs.replace(word, heard=self._heard[0])
            data = UP.encode(word)
            for socket in self._sockets.values():
                socket.send(data, copy=False)
            return
        deltas = self.owners.deltas(word.deltas)
        refused = self.owners.refused(word.refused)
        for client, socket in self._sockets.items():
            part = StepOutputs(
                deltas.get(client), refused.get(client, []), word.stats, self._heard[client]
            )
            if part.deltas is not None or part.refused or part.stats is not None:
                socket.send(UP.encode(part), copy=False)

    def send_to(self, client: int, word: Controlled) -> None:
        """Sends to one client, if it is still connected."""
        if (socket := self._sockets.get(client)) is not None:
            socket.send(UP.encode(word), copy=False)

    def close(self) -> None:
        for client in list(self._sockets):
            self._drop(client, linger=1000)
        self._context.term()

    def _connect(self, client: int, address: str) -> None:
        socket = self._context.socket(zmq.PAIR)
        socket.set_hwm(0)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(address)
        self._sockets[client] = socket
        for each in (socket, monitor):
            self._clients[each] = client
            self._poller.register(each, zmq.POLLIN)

    def _hear(self, client: int, socket: zmq.Socket[bytes]) -> list[Heard]:
        """Returns a client's messages. `socket` may be the client's monitor socket: then returns
        Left, since it reports only that the client's process has gone."""
        if socket is not self._sockets[client]:
            recv_monitor_message(socket)
            return self._left(client)
        words: list[Heard] = []
        for data in socket.recv_multipart():
            word = DOWN.decode(data)
            if isinstance(word, Close):
                return words + self._left(client)
            words.append(self._own(client, word))
        return words

    def _own(self, client: int, word: Ask | Cancel | Control) -> Heard:
        """Returns a client's message with the client's request id replaced by the engine's."""
        if isinstance(word, Control):
            return ControlOf(client, word)
        if isinstance(word, Cancel):
            return Cancel(self.owners.engine_id(client, word.request_id), word.sample)
        self._heard[client] += 1
        if self.owners.count == 1:
            return word
        return Ask(
            replace(word.request, request_id=self.owners.engine_id(client, word.request.request_id))
        )

    def _left(self, client: int) -> list[Heard]:
        self._drop(client, linger=0)
        return [Left(client)]

    def _drop(self, client: int, linger: int) -> None:
        socket = self._sockets.pop(client)
        for each in [known for known, number in self._clients.items() if number == client]:
            self._poller.unregister(each)
            del self._clients[each]
        socket.disable_monitor()
        socket.close(linger=linger)


class ClientEnd:
    """The client's end of the channel, for an asyncio event loop.

    The loop watches the socket's descriptor: with pyzmq's asyncio sockets a chat takes 0.1 to 0.3
    ms more. The descriptor signals a change once (zmq_getsockopt(3), ZMQ_FD), so that each send
    is followed by a look whether a message has come."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._words: list[bytes] = []  # messages queued in this turn of the event loop
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop that watches the descriptor
        self._come: asyncio.Future[None] | None = None  # done once `receive` should look again

    def send_down(self, word: Down) -> None:
        """Queues a message; never waits (the queue is unbounded: admission above it is bounded).

        All messages of one turn of the loop are sent as one at its end: sending each by itself took
        a fifth of the cost of a bulk request."""
        data = DOWN.encode(word)
        if not self._words:
            asyncio.get_running_loop().call_soon(self._flush)
        self._words.append(data)

    def _flush(self) -> None:
        """Sends what was queued. Without a peer it stays queued until there is one."""
        if self._words and not self._socket.closed:
            self._send()
            if self._words:
                self._watch(asyncio.get_running_loop())
            self._changed()

    def _send(self) -> None:
        """Sends what is queued, if there is a peer."""
        words, self._words = self._words, []
        try:
            self._socket.send_multipart(words, zmq.DONTWAIT)
        except zmq.Again:
            self._words = words

    def _changed(self) -> None:
        """Looks what has changed: a message has come, or a peer."""
        events = int(self._socket.getsockopt(zmq.EVENTS))
        if events & zmq.POLLIN and self._come is not None and not self._come.done():
            self._come.set_result(None)

    def _woken(self) -> None:
        """Runs when the descriptor can be read."""
        self._changed()
        self._flush()

    async def receive(self) -> Up:
        """Returns the next message from the engine. Raises EngineError."""
        while True:
            try:
                return UP.decode(self._socket.recv(zmq.DONTWAIT))
            except zmq.Again:
                pass
            loop = asyncio.get_running_loop()
            self._watch(loop)
            self._come = loop.create_future()
            self._woken()  # a change may have been signalled before
            await self._come

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is not self._loop:
            self._unwatch()
            self._loop = loop
            loop.add_reader(self._descriptor, self._woken)

    def _unwatch(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._loop = None

    def close(self, *, flush: bool = False) -> None:
        """Closes the socket. flush: give queued messages one second to be sent (for an engine that
        lives)."""
        if flush and self._words and not self._socket.closed:
            self._send()
        self._words = []  # drop the rest: no later turn of the loop sends it
        self._unwatch()
        if self._come is not None:
            self._come.cancel()  # `receive` ends too
        self._socket.close(linger=1000 if flush else 0)
        self._context.term()
