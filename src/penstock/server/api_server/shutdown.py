"""Signals that ask a server to end, counted, and the fast end of a process whose threads would
delay it. Knows signals and a loop; no server."""

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
PATIENCE = 1.0  # seconds; the other work at a process's end takes milliseconds


class StopSignals:
    """Counts signals: the first lets running requests end in time, the second ends them now."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def __call__(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


@contextlib.contextmanager
def signals() -> Iterator[StopSignals]:
    """Counts SIGINT and SIGTERM inside the block. SIGHUP counts as a first signal, never as a
    second: a closing terminal sends it two or three times. It stays ignored if it was so at the
    start (`nohup`)."""
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
    """Returns the result of `work`; None if a signal comes first, after `work` was cancelled and
    has ended."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.first.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not (stopped.done() and task.exception() is not None):
            return task.result()
        # a signal to the whole terminal may kill the engine first: not an error
        task.cancel()
        await asyncio.wait((task,))
        return None
    finally:
        task.cancel()
        stopped.cancel()


@contextlib.contextmanager
def fast_exit() -> Iterator[None]:
    """Ends the process at most PATIENCE seconds after the block, which holds its whole work.
    Threads that still run are not waited for: their callers know that the server ends."""
    try:
        yield
    except PenstockError as error:
        exit_soon(error.exit_code)
        raise
    except BaseException:  # a fault of ours; its traceback is printed meanwhile
        exit_soon(1)
        raise
    exit_soon(0)


def exit_soon(code: int) -> None:
    """Ends the process with this code after PATIENCE seconds, unless it ends before."""
    timer = threading.Timer(PATIENCE, os._exit, (code,))
    timer.daemon = True
    timer.start()
