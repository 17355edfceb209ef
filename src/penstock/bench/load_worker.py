"""A client process of a load: `python -m penstock.bench.load_worker PIPE`, started by worker_pool.py.

It reads its spec, opens connections, says that it is ready, waits for the word, and writes columns at the end. A load
that has gone away ends it. It knows messages and columns; what is sent when is load_generator.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import resource
import sys
import threading
from array import array
from itertools import pairwise
from multiprocessing.connection import Connection

import uvloop

from penstock.bench.client_connection import SentRequest
from penstock.bench.load_generator import LoadGenerator
from penstock.bench.worker_protocol import (
    COLUMNS,
    WorkerReady,
    WorkerResult,
    WorkerSpec,
    WorkerStart,
    WorkerStop,
    receive,
    send,
)


def main() -> int:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    pipe = Connection(int(sys.argv[1]))
    spec = receive(pipe)
    if not isinstance(spec, WorkerSpec):
        return 1  # the load is gone
    client = LoadGenerator(spec, lambda news: send(pipe, news))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        part = runner.run(_serve(client, pipe))
    if client.fault is not None:
        raise client.fault
    if part is not None:
        send(pipe, part)
        threading.Event().wait()  # the load ends this process when it has read all; so does `_listen` if it goes away
    return 0


async def _serve(client: LoadGenerator, pipe: Connection) -> WorkerResult | None:
    """Returns a point's columns; None when the load went away first."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(client.crashed)
    send(pipe, WorkerReady(await client.open()))
    go = await loop.run_in_executor(None, receive, pipe)
    if not isinstance(go, WorkerStart):
        return None
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection over all requests holds the loop for milliseconds; a point makes few cycles
    threading.Thread(target=_listen, args=(loop, client, pipe), daemon=True).start()
    await client.run(go.begin)
    return part_of(client)


def _listen(loop: asyncio.AbstractEventLoop, client: LoadGenerator, pipe: Connection) -> None:
    """Waits, in a thread, for a stop and for the load to go away."""
    while isinstance(receive(pipe), WorkerStop):
        with contextlib.suppress(RuntimeError):  # the point has ended by itself, and its loop is closed
            loop.call_soon_threadsafe(client.stop)
    os._exit(0)


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
    sys.exit(main())
