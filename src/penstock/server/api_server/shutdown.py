"""What asks a server to end (signals, counted), and the end of a process of ours that a thread
would hold up: who asked for what it makes was told that the server ends. It knows signals and a
loop; no server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from penstock.errors import PenstockError

Result = TypeVar("Result")
PATIENCE = 1.0  # seconds; what else there is to do at a process's end takes milliseconds


class StopSignals:
    """Signals counted: the first asks running requests to end in their time, the second ends them
    now."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def __call__(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


@contextlib.contextmanager
def signals() -> Iterator[StopSignals]:
    """Inside, SIGINT and SIGTERM are counted. SIGHUP, unless it was ignored at the start (`nohup`),
    is a first one and never a second: a terminal that closes sends it two or three times."""
    loop, stop = asyncio.get_running_loop(), StopSignals()
    ours: dict[signal.Signals, Callable[[], None]] = {signal.SIGINT: stop, signal.SIGTERM: stop}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ours[signal.SIGHUP] = stop.first.set
    for number, asks in ours.items():
        loop.add_signal_handler(number, asks)
    try:
        yield stop
    finally:
        for number in ours:
            loop.remove_signal_handler(number)


async def unless_stopped(work: Coroutine[Any, Any, Result], stop: StopSignals) -> Result | None:
    """The result of `work`, or None if a signal came first; the work is cancelled then and has
    ended."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.first.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not (stopped.done() and task.exception() is not None):
            return task.result()
        # of a signal to the whole terminal the engine may have died first: that is no error
        task.cancel()
        await asyncio.wait((task,))
        return None
    finally:
        task.cancel()
        stopped.cancel()


@contextlib.contextmanager
def fast_exit() -> Iterator[None]:
    """Around what a process is there for: from its end on it has PATIENCE to say what it has to
    say."""
    try:
        yield
    except PenstockError as error:
        exit_soon(error.exit_code)
        raise
    except BaseException:  # a fault of ours, whose traceback is printed meanwhile
        exit_soon(1)
        raise
    exit_soon(0)


def exit_soon(code: int) -> None:
    """The process ends with this code, in PATIENCE at the latest."""
    timer = threading.Timer(PATIENCE, os._exit, (code,))
    timer.daemon = True
    timer.start()
