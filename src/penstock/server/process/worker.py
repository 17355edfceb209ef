"""One of several server processes: `python -m penstock.server.process.worker`, started by multi_process.py alone. The
parent speaks on standard input, a line of JSON a word, and its end is ours; what we say goes to standard output. It
knows serve's parts, and how to join an engine.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import msgspec
import uvloop

from penstock.engine.async_client import SharedEngine
from penstock.engine.channel import ClientEnd, Failed
from penstock.engine.launch import join
from penstock.errors import PenstockError
from penstock.parent_death import begin_child
from penstock.server.online.metrics import Board
from penstock.server.process.shutdown import StopSignals, exit_soon, unless_stopped
from penstock.server.process.site import Site, serve_engine


class ServerStart(msgspec.Struct):
    """The first line down. `listener` and `board` are descriptors; this is server `number` of `count`."""

    address: str
    listener: int
    board: int
    number: int
    count: int
    site: Site
    tokenizer: bool


class ServerDrain(msgspec.Struct, tag="drain"):
    """Down: end as on a signal; the second time, now."""


class EngineEnded(msgspec.Struct, tag="engine_ended"):
    """Down: the engine's process has ended."""

    code: int


class Serves(msgspec.Struct, tag="serves"):
    """Up: connections are taken. (Else Failed comes up, with what was raised.)"""


Down = ServerDrain | EngineEnded
Up = Serves | Failed


def main() -> int:
    begin_child()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_work())
        except PenstockError as error:
            _say(Failed(type(error).__name__, str(error), error.param))
            return error.exit_code
    return 0


async def _work() -> None:
    lines = asyncio.StreamReader(limit=2**20)
    protocol = asyncio.StreamReaderProtocol(lines)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    first = await lines.readline()
    if not first:
        return  # the parent was gone before it said anything
    start = msgspec.json.decode(first, type=ServerStart)
    engine, stop = SharedEngine(), StopSignals()
    hearing = asyncio.create_task(_hear(lines, engine, stop))
    joining = join(ClientEnd(start.address), engine, start.tokenizer, start.site.limits.step_timeout)
    client = await unless_stopped(joining, stop)
    if client is not None:
        board = Board(start.board, start.number, start.count)
        try:
            with socket.socket(fileno=start.listener) as listener:
                await serve_engine(client, listener, start.site, stop, lambda: _say(Serves()), board)
        finally:
            await client.close()
    hearing.cancel()


async def _hear(lines: asyncio.StreamReader, engine: SharedEngine, stop: StopSignals) -> None:
    """What the parent says. Its end leaves nobody to serve for."""
    decoder = msgspec.json.Decoder(Down)
    while heard := await lines.readline():
        word = decoder.decode(heard)
        if isinstance(word, EngineEnded):
            engine.ended(word.code)
        else:
            stop()
    os._exit(1)


def _say(word: Up) -> None:
    # Under PYTHONUNBUFFERED sys.stdout is the bare descriptor, whose write may take a part of a line.
    with open(sys.stdout.fileno(), "wb", closefd=False) as out:
        out.write(msgspec.json.encode(word) + b"\n")


if __name__ == "__main__":
    code = main()
    exit_soon(code)
    sys.exit(code)
