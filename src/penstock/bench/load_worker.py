"""A client process of a load: `python -m penstock.bench.load_worker`, started by worker_pool.py.

It reads its spec, opens connections, says that it is ready, waits for the word, and writes columns at the end. A load
that has gone away ends it. It knows frames and columns; what is sent when is load_generator.py's.
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
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, BinaryIO, cast

import uvloop

from penstock.bench.load_generator import LoadGenerator
from penstock.bench.worker_protocol import WorkerReady, WorkerResult, WorkerSpec, WorkerStart, WorkerStop, pack, read


def main() -> int:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Raw, for a thread that waits on a buffered stdin holds its lock, and the interpreter could not end.
    pipe = cast(BinaryIO, open(0, "rb", buffering=0, closefd=False))  # noqa: SIM115 - it is stdin
    spec = read(pipe)
    if not isinstance(spec, WorkerSpec):
        return 1  # the load is gone
    client = LoadGenerator(spec, write)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        part = runner.run(_serve(client, pipe))
    if client.fault is not None:
        raise client.fault
    if part is not None:
        write(part)
        threading.Event().wait()  # the load ends this process when it has read all; so does `_listen` if it goes away
    return 0


async def _serve(client: LoadGenerator, pipe: BinaryIO) -> WorkerResult | None:
    """Returns a point's columns; None when the load went away first."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(client.crashed)
    write(WorkerReady(await client.open()))
    go = await loop.run_in_executor(None, read, pipe)
    if not isinstance(go, WorkerStart):
        return None
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection over all requests holds the loop for milliseconds; a point makes few cycles
    threading.Thread(target=_listen, args=(loop, client, pipe), daemon=True).start()
    await client.run(go.begin)
    return part_of(client)


def _listen(loop: asyncio.AbstractEventLoop, client: LoadGenerator, pipe: BinaryIO) -> None:
    """Waits, in a thread, for a stop and for the load to go away."""
    while isinstance(read(pipe), WorkerStop):
        with contextlib.suppress(RuntimeError):  # the point has ended by itself, and its loop is closed
            loop.call_soon_threadsafe(client.stop)
    os._exit(0)


def part_of(client: LoadGenerator) -> WorkerResult:
    """Returns the columns of all requests that were taken up, with times since the point's begin."""
    posts = [post for post in client.posts if not math.isnan(post.taken)]
    times = [post.answer.times if post.answer else array("d") for post in posts]
    usages = [post.answer.usage if post.answer else None for post in posts]
    troubles: dict[str, str] = {}
    for post in posts:
        if post.outcome != "ok":
            troubles.setdefault(str(post.outcome), post.message)
    return WorkerResult(
        number=_ints([post.number for post in posts]),
        intended=_instants([post.intended for post in posts], client.begin),
        actual=_instants([post.actual for post in posts], client.begin),
        first=_instants([each[0] if len(each) else math.nan for each in times], client.begin),
        end=_instants([post.end for post in posts], client.begin),
        events=_ints([len(each) for each in times]),
        gaps=array("f", (later - one for each in times for one, later in pairwise(each))).tobytes(),
        prompt_tokens=_ints([usage.prompt_tokens if usage else -1 for usage in usages]),
        output_tokens=_ints([usage.completion_tokens if usage else -1 for usage in usages]),
        cached_tokens=_ints([usage.cached if usage else -1 for usage in usages]),
        outcome=[str(post.outcome) for post in posts],
        late=client.late.tobytes(),
        lags=client.lags.tobytes(),
        troubles=troubles,
        again=client.again,
        cpu=client.cpu,
        wall=client.wall,
    )


def _ints(values: Iterable[int]) -> bytes:
    return array("i", values).tobytes()


def _instants(values: Iterable[float], begin: float) -> bytes:
    return array("d", (value - begin for value in values)).tobytes()


def write(message: Any) -> None:
    """Writes all of it: with PYTHONUNBUFFERED a write to stdout may take a part and say so."""
    data = memoryview(pack(message))
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main())
