"""One of several server processes. multi_process.py starts it as `python -m
penstock.server.api_server.worker`. The parent writes one line of JSON per message to this process's
standard input; when that closes, the process exits. Messages to the parent go to standard output.
Knows the parts of serve.py, and how to join running engines.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import msgspec
import uvloop

from penstock.children.carried_error import CarriedError
from penstock.children.lifetime import begin_child
from penstock.errors import PenstockError
from penstock.replicas.replica_set import ReplicaSet
from penstock.replicas.replica_words import WordDown, WordUp
from penstock.server.api_server.shutdown import StopSignals, exit_soon, unless_stopped
from penstock.server.api_server.site import Site, serve_engine
from penstock.server.online.metrics import Board


class ServerStart(msgspec.Struct):
    """First message from the parent. listener, board: file descriptors of the listening socket and
    of the shared metrics. number, count: this is process `number` of `count`. replicas: number of
    engines. seed: the engines' seed."""

    listener: int
    board: int
    number: int
    count: int
    site: Site
    tokenizer: bool
    replicas: int
    seed: int


class ServerDrain(msgspec.Struct, tag="drain"):
    """Message from the parent: end as after a signal. A second one means at once."""


class Serves(msgspec.Struct, tag="serves"):
    """Message to the parent: this process accepts connections. After a failed start it sends
    CarriedError instead."""


Down = ServerDrain | WordDown
Up = Serves | CarriedError | WordUp


def main() -> int:
    begin_child()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_work())
        except PenstockError as error:
            _say(CarriedError.of(error))
            return error.exit_code
    return 0


async def _work() -> None:
    lines = asyncio.StreamReader(limit=2**20)
    protocol = asyncio.StreamReaderProtocol(lines)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    first = await lines.readline()
    if not first:
        return  # the parent died before its first message
    start = msgspec.json.decode(first, type=ServerStart)
    stop = StopSignals()
    client = ReplicaSet(
        start.replicas,
        _say,
        number=start.number,
        seed=start.seed,
        tokenizer=start.tokenizer,
        step_timeout=start.site.limits.step_timeout,
    )
    hearing = asyncio.create_task(_hear(lines, client, stop))
    try:
        if await unless_stopped(client.began(), stop):
            board = Board(start.board, start.number, start.count)
            with socket.socket(fileno=start.listener) as listener:
                await serve_engine(
                    client, listener, start.site, stop, lambda: _say(Serves()), board
                )
    finally:
        await client.close()
    hearing.cancel()


async def _hear(lines: asyncio.StreamReader, client: ReplicaSet, stop: StopSignals) -> None:
    """Handles the parent's messages. Ends the process when the parent has gone."""
    decoder = msgspec.json.Decoder(Down)
    while heard := await lines.readline():
        word = decoder.decode(heard)
        if isinstance(word, ServerDrain):
            stop()
        else:
            client.hear(word)
    os._exit(1)


def _say(word: Up) -> None:
    # Not sys.stdout: with PYTHONUNBUFFERED it is unbuffered, and may write only part of a line.
    with open(sys.stdout.fileno(), "wb", closefd=False) as out:
        out.write(msgspec.json.encode(word) + b"\n")


if __name__ == "__main__":
    code = main()
    exit_soon(code)
    sys.exit(code)
