"""unswept: imports modules without garbage collection. Knows no module."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unswept() -> Iterator[None]:
    """Disables the garbage collector inside, then freezes all objects, so that it skips them. Only
    for imports at a process's start: scanning torch's objects three times took a sixth of its
    import, and none is ever freed. Existing garbage stays too.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was:
            gc.enable()
