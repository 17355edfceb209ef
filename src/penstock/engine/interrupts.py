"""held_interrupts: delays Ctrl-C until a block ends. Knows signals alone.

The engine of an `LLM` runs in the caller's thread. A KeyboardInterrupt in the middle of a step
would leave a launched step that is never read. So Ctrl-C is delayed until the step is over; a
second one interrupts at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Delays Ctrl-C to the end of the block; a second one raises at once.

    Does nothing in other threads (Python raises KeyboardInterrupt only in the main thread) or if
    the user has installed another SIGINT handler."""
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
