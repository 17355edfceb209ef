"""The channel: how requests go down to an engine in another process, and how its news come up.

Typed msgpack (children/array_codec.py) over ZeroMQ, a PAIR over ipc for each client. Clients count
their requests by themselves: the engine's end makes ids of its own out of theirs, sends each client
what is its own, and notices when one has gone. In-process users (`llm`) call the engine directly
and need none of this. It knows the words that cross; neither scheduling nor text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import zmq
import zmq.asyncio
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
    """Down: a request."""

    request: Request


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Down: end a request, or one sample of it."""

    request_id: int
    sample: int | None


class Close(msgspec.Struct, tag="close", frozen=True):
    """Down, last: this client wants nothing more. The last client's end is the engine's."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Up, once: the engine is loaded."""

    facts: EngineFacts


class StepOutputs(msgspec.Struct, tag="news", frozen=True):
    """Up: what one step brought, and the engine's stats now and then. heard: how many requests of
    this client are in those."""

    deltas: Deltas | None
    refused: list[Refused]
    stats: dict[str, float] | None
    heard: int = 0


class GoesOn(msgspec.Struct, tag="goes on", frozen=True):
    """Up: a step that takes long is not done, and was seen to go on."""


Down = Ask | Cancel | Close | Control
Up = Ready | CarriedError | StepOutputs | GoesOn | Controlled | Weights


# bytes that are none come from who is broken, or no part of this engine
_WHAT = "a message between server and engine"
DOWN: ArrayCodec[Down] = ArrayCodec(Down, _WHAT)
UP: ArrayCodec[Up] = ArrayCodec(Up, _WHAT)


@dataclass(frozen=True, slots=True)
class Left:
    """What the engine's end says of a client that has closed, or whose process has gone."""

    client: int


@dataclass(frozen=True, slots=True)
class ControlOf:
    """What the engine's end says of a client that asks for something between steps."""

    client: int
    control: Control


Heard = Ask | Cancel | Left | ControlOf


class EngineEnd:
    """The engine's end: where requests arrive and news leaves. A client is a number, its place
    among `addresses`."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        # by socket, and by the monitor that tells of its end
        self._clients: dict[zmq.Socket[bytes], int] = {}
        self.owners = ClientIds(len(addresses))
        self._heard = [0] * len(addresses)  # requests, a client
        for client, address in enumerate(addresses):
            self._connect(client, address)

    @property
    def clients(self) -> int:
        """How many have not left."""
        return len(self._sockets)

    def receive(self, wait_ms: int) -> list[Heard]:
        """All words that are here; waits for the first for at most `wait_ms` (-1: for ever). Raises
        EngineError."""
        words: list[Heard] = []
        while found := self._poller.poll(wait_ms if not words else 0):
            for socket, _ in found:
                client = self._clients.get(socket)
                if client is not None:  # else it left a moment ago
                    words += self._hear(client, socket)
        return words

    def send_up(self, word: Up) -> None:
        """To all clients; of news, to each what is its own."""
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
        """To one client, if it is still there."""
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
        """Words of a client, or of the monitor of its socket, whose only news is that its process
        has gone."""
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
        """A client's word with the engine's ids in place of its own."""
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
    """The client's end, for an asyncio loop."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._words: list[bytes] = []  # of this turn of the loop

    def send_down(self, word: Down) -> None:
        """Queues a word; never waits (the queue has no bound: what is admitted is bounded above
        it). All words of a turn of the loop go out as one message at its end: each by itself took a
        fifth of what a row of bulk costs."""
        data = DOWN.encode(word)
        if not self._words:
            asyncio.get_running_loop().call_soon(self._flush)
        self._words.append(data)

    def _flush(self) -> None:
        """Sends what was queued.

        Through the asyncio socket, not through a shadow of it: a send takes the descriptor's one
        wake-up, and only the asyncio socket then looks for itself whether news has come. (Through a
        shadow, bursts left `receive` asleep.)
        """
        words, self._words = self._words, []
        if words:
            sent = asyncio.ensure_future(self._socket.send_multipart(words))
            if sent.done():
                sent.result()  # raises what went wrong at once; else it goes out in its turn

    async def receive(self) -> Up:
        """Raises EngineError."""
        return UP.decode(await self._socket.recv())

    def close(self, *, flush: bool = False) -> None:
        """`flush` gives words that are still here a second to go out: to an engine that lives."""
        if flush:
            self._flush()
        self._words = []  # no turn to come sends them
        self._socket.close(linger=1000 if flush else 0)
        self._context.term()
