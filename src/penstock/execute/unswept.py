"""unswept: imports modules without garbage collection. Knows no module."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unswept() -> Iterator[None]:
    """Disables the garbage collector inside the block, then freezes all objects, so that later
    collections skip them. Only for imports at a process's start: three collections took a sixth of
    torch's import time, and imported objects are never freed. Garbage that exists by then is never
    freed either.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was:
            gc.enable()
