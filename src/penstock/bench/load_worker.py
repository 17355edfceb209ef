"""A client process of loads: `python -m penstock.bench.load_worker PIPE`, started by worker_pool.py; it ends when who
started it goes away. It knows messages and columns; what is sent when is load_generator.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import queue
import resource
import sys
import threading
from array import array
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection

import uvloop

from penstock.bench.client_connection import SentRequest
from penstock.bench.load_generator import LoadGenerator
from penstock.bench.worker_protocol import (
    COLUMNS,
    Message,
    WorkerReady,
    WorkerResult,
    WorkerSpec,
    WorkerStart,
    WorkerStop,
    receive,
    send,
)


class Worker:
    """Does load after load. A thread hears the pipe, for a stop comes while a loop runs."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._told: queue.SimpleQueue[Message] = queue.SimpleQueue()  # but stops
        self._stop: Callable[[], object] = lambda: None
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while (message := receive(self._pipe)) is not None:
            if not isinstance(message, WorkerStop):
                self._told.put(message)
                continue
            with contextlib.suppress(RuntimeError):  # the point has ended by itself, and its loop is closed
                self._stop()
        os._exit(0)  # the load has gone away

    def work(self) -> None:
        """Does the next load. Raises what was a fault of ours in it."""
        spec = self._told.get()
        assert isinstance(spec, WorkerSpec)
        client = LoadGenerator(spec, lambda news: send(self._pipe, news))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            part = runner.run(self._serve(client))
        if client.fault is not None:
            raise client.fault
        send(self._pipe, part)

    async def _serve(self, client: LoadGenerator) -> WorkerResult:
        """Returns a point's columns."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(client.crashed)
        self._stop = lambda: loop.call_soon_threadsafe(client.stop)
        send(self._pipe, WorkerReady(await client.open()))
        go = await loop.run_in_executor(None, self._told.get)
        assert isinstance(go, WorkerStart)
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection over all requests holds the loop for milliseconds; a point makes few cycles
        await client.run(go.begin)
        return part_of(client)


def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    worker = Worker(Connection(int(sys.argv[1])))
    while True:
        worker.work()


def part_of(client: LoadGenerator) -> WorkerResult:
    """Returns the columns of all requests that were taken up, with times since the point's begin."""
    posts = [post for post in client.posts if not math.isnan(post.taken)]
    rows = [_row(post, client.begin) for post in posts]
    troubles: dict[str, str] = {}
    for post in posts:
        if post.outcome != "ok":
            troubles.setdefault(str(post.outcome), post.message)
    times = [post.answer.times for post in posts if post.answer]
    return WorkerResult(
        columns={
            name: array(kind, [row[at] for row in rows]).tobytes() for at, (name, kind) in enumerate(COLUMNS.items())
        },
        gaps=array("f", (later - one for each in times for one, later in pairwise(each))).tobytes(),
        outcome=[str(post.outcome) for post in posts],
        late=client.late.tobytes(),
        lags=client.lags.tobytes(),
        troubles=troubles,
        again=client.again,
        cpu=client.cpu,
        wall=client.wall,
    )


def _row(post: SentRequest, begin: float) -> tuple[float, ...]:
    """Returns COLUMNS' numbers of a request."""
    times = post.answer.times if post.answer else ()
    usage = post.answer.usage if post.answer else None
    instants = (post.intended, post.actual, times[0] if times else math.nan, post.end)
    tokens = (usage.prompt_tokens, usage.completion_tokens, usage.cached) if usage else (-1, -1, -1)
    return post.number, *(instant - begin for instant in instants), len(times), *tokens


if __name__ == "__main__":
    main()
