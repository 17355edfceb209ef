"""held_interrupts: a stretch of code that Ctrl-C doesn't tear. It knows signals alone.

The engine of an `LLM` runs in the caller's thread. A KeyboardInterrupt in the middle of a step
would leave a flight that was taken off the line and never read. So a step is held: Ctrl-C counts
when it is over, a second one at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Ctrl-C raises at the end of the block; pressed twice, at once. Other threads, and handlers
    that somebody set for themselves, are left alone: Python raises KeyboardInterrupt only in the
    main thread, by its own handler."""
    usual = signal.default_int_handler
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not usual
    ):
        yield
        return
    pressed: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if pressed:
        raise KeyboardInterrupt
