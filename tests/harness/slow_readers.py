"""Slow readers beside normal ones: what 200 streams that hardly read cost 50 that do, and what the
server keeps.

It knows a service over HTTP; times are a client's, between two events of a stream.
"""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bare_http import CLOSE, request
from fake_runner import Orders
from in_loop import close, post
from service import HANG, Serving, make_folder, memory, wait_until

STEP = 0.02


@dataclass
class Beside:
    alone: float = 0.0  # p99 of the time between two events of a normal stream, seconds
    beside: float = 0.0
    events: int = 0  # that the normal ones read beside them
    grown: int = 0  # bytes
    at_rest: bool = False

    def faults(self, most: float = 1.2) -> list[str]:
        found = [] if self.at_rest else ["not at rest afterwards"]
        found += [self.line()] if self.beside > most * self.alone else []
        return found + ([f"memory grew by {self.grown >> 20} MB"] if self.grown > 200 << 20 else [])

    def line(self) -> str:
        ratio = self.beside / self.alone
        return (
            f"p99 between events {self.beside * 1000:.1f} ms beside them, {self.alone * 1000:.1f}"
            f" alone: {ratio:.2f}"
        )


def run(folder: Path, *, slow: int = 200, normal: int = 50, tokens: int = 400) -> Beside:
    make_folder(
        folder,
        Orders(step_seconds=STEP),
        rows=slow + normal,
        num_blocks=40 * (slow + normal),
        longest=2048,
    )
    made = Beside()
    with Serving(folder, limits={"max_num_queued_reqs": 100_000}) as serving:
        port = int(serving.url.rsplit(":", 1)[1])
        asyncio.run(_gaps(port, normal, 50))  # warm
        made.alone, _ = asyncio.run(_gaps(port, normal, tokens))
        before = memory(serving.process.pid)
        asyncio.run(_beside(made, port, slow, normal, tokens))
        made.grown = memory(serving.process.pid) - before
        made.at_rest = wait_until(serving.at_rest, HANG) is not None
    return made


async def _beside(made: Beside, port: int, slow: int, normal: int, tokens: int) -> None:
    readers = [await _slow(port, number, 2 * tokens) for number in range(slow)]
    dripping = asyncio.create_task(_drip(readers))
    await asyncio.sleep(1.0)
    made.beside, made.events = await _gaps(port, normal, tokens)
    dripping.cancel()
    for reader in readers:
        reader.close()


async def _slow(port: int, number: int, tokens: int) -> socket.socket:
    """A stream whose reader's kernel takes 4 KB and whose program takes 16 bytes now and then."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    await asyncio.get_running_loop().sock_sendall(connection, request(_body(number, tokens), CLOSE))
    return connection


async def _drip(readers: list[socket.socket]) -> None:
    while True:
        for reader in readers:
            try:
                reader.recv(16)
            except BlockingIOError:
                continue
        await asyncio.sleep(0.5)


async def _gaps(port: int, count: int, tokens: int) -> tuple[float, int]:
    """p99 of the gaps between events of `count` streams, and how many there were."""
    gaps: list[float] = []

    async def one(number: int) -> None:
        reader, writer = await post(port, _body(1000 + number, tokens))
        last = None
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now
        await close(writer)

    await asyncio.gather(*(one(number) for number in range(count)))
    return sorted(gaps)[int(0.99 * len(gaps))], len(gaps)


def _body(number: int, tokens: int) -> dict[str, Any]:
    return {"prompt": [1 + number % 250] * 20, "max_tokens": tokens, "seed": number, "stream": True}
