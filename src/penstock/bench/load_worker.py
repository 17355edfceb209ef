"""A client process that sends requests to the server. worker_pool.py starts it as `python -m
penstock.bench.load_worker FD`; it exits when its parent is gone. Knows messages; load_generator.py
decides what is sent when.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import resource
import socket
import sys
from array import array
from itertools import pairwise

import uvloop

from penstock.bench.client_connection import SentRequest
from penstock.bench.load_generator import LoadGenerator
from penstock.bench.worker_protocol import (
    RequestResult,
    WorkerReady,
    WorkerResult,
    WorkerSpec,
    WorkerStart,
    receive,
    send,
)


def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    channel = socket.socket(fileno=int(sys.argv[1]))
    while (message := receive(channel)) is not None:
        # any other message is a stop for a load that had just ended
        if isinstance(message, WorkerSpec):
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                result = runner.run(_work(channel, message))
            send(channel, result)


async def _work(channel: socket.socket, spec: WorkerSpec) -> WorkerResult:
    """Runs this process's share of a load and returns its result. Raises only errors of this code;
    failures of requests are in the result."""
    loop = asyncio.get_running_loop()
    client = LoadGenerator(spec, lambda news: send(channel, news))
    loop.set_exception_handler(client.crashed)
    await client.open()
    send(channel, WorkerReady())
    start = receive(channel)  # blocks until the parent's start message comes
    if not isinstance(start, WorkerStart):
        sys.exit(0)
    loop.add_reader(channel.fileno(), _told, channel, client)
    # the loop made the socket non-blocking; large messages need it blocking
    channel.setblocking(True)
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    # a garbage collection would block the loop for milliseconds; a load level makes few cycles
    gc.disable()
    await client.run(start.begin)
    loop.remove_reader(channel.fileno())
    if client.fault is not None:
        raise client.fault
    return result_of(client)


def _told(channel: socket.socket, client: LoadGenerator) -> None:
    if receive(channel) is None:
        os._exit(0)  # the parent process is gone: exit at once
    client.stop()


def result_of(client: LoadGenerator) -> WorkerResult:
    """Returns the results of all requests that were taken up."""
    posts = [post for post in client.posts if not math.isnan(post.taken)]
    troubles: dict[str, str] = {}
    for post in posts:
        if post.outcome != "ok":
            troubles.setdefault(str(post.outcome), post.message)
    return WorkerResult(
        requests=[_row(post, client.begin) for post in posts],
        late=client.late.tobytes(),
        lags=client.lags.tobytes(),
        troubles=troubles,
        cpu=client.cpu,
        wall=client.wall,
    )


def _row(post: SentRequest, begin: float) -> RequestResult:
    times = post.answer.times if post.answer else array("d")
    usage = post.answer.usage if post.answer else None
    return RequestResult(
        number=post.number,
        intended=post.intended - begin,
        actual=post.actual - begin,
        first=times[0] - begin if times else math.nan,
        end=post.end - begin,
        events=len(times),
        gaps=array("f", (later - one for one, later in pairwise(times))).tobytes(),
        prompt_tokens=usage.prompt_tokens if usage else -1,
        output_tokens=usage.completion_tokens if usage else -1,
        cached_tokens=usage.cached if usage else -1,
        outcome=str(post.outcome),
    )


if __name__ == "__main__":
    main()
