"""The end of a process of ours that a thread would hold up.

A thread that tokenises cannot be ended, takes 9 s for 32 MiB, and the interpreter waits for it; one that a disk doesn't
answer takes for ever. Nobody waits for what they make: who asked was told that the server ends. It knows no server.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from penstock.errors import PenstockError

PATIENCE = 1.0  # seconds; what else there is to do at a process's end takes milliseconds


@contextlib.contextmanager
def fast_exit() -> Iterator[None]:
    """Around what a process is there for: from its end on it has PATIENCE to say what it has to say."""
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
