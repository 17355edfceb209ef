"""Stop signals and the fast end of processes. Counts the signals that ask a server to end, and ends
a process whose threads would delay it. Knows signals and an event loop; no server."""

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
PATIENCE = 1.0  # seconds that a process may take to end; without busy threads it takes milliseconds


class StopSignals:
    """Counts signals. `first`: running requests get some seconds to end. `second`: they are ended
    at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def __call__(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


@contextlib.contextmanager
def signals() -> Iterator[StopSignals]:
    """Counts SIGINT and SIGTERM inside the block. SIGHUP counts only as the first signal, since a
    closing terminal sends it two or three times. It stays ignored if it was ignored at the start
    (`nohup`)."""
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
    """Returns the result of `work`. If a signal comes first, cancels `work`, waits for its end, and
    returns None."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.first.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not (stopped.done() and task.exception() is not None):
            return task.result()
        # a signal to the whole terminal may kill the engine first, which is no error
        task.cancel()
        await asyncio.wait((task,))
        return None
    finally:
        task.cancel()
        stopped.cancel()


@contextlib.contextmanager
def fast_exit() -> Iterator[None]:
    """Ends the process at most PATIENCE seconds after the block, which contains the whole work of
    the process. Doesn't wait for threads that still run, since their callers know that the server
    ends."""
    try:
        yield
    except PenstockError as error:
        exit_soon(error.exit_code)
        raise
    except BaseException:  # a bug; its traceback is printed before the process ends
        exit_soon(1)
        raise
    exit_soon(0)


def exit_soon(code: int) -> None:
    """Ends the process with this exit code after PATIENCE seconds, unless it ends before."""
    timer = threading.Timer(PATIENCE, os._exit, (code,))
    timer.daemon = True
    timer.start()
