"""unswept: modules are imported without the collector of cycles looking through them. It knows no
module."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unswept() -> Iterator[None]:
    """Lets the collector rest inside, and has it pass over what is there from then on. For imports
    of a process's first seconds alone: torch's objects are looked through three times while they
    come, which is a sixth of its import, and none of them ever goes. What is garbage by then stays.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was:
            gc.enable()
