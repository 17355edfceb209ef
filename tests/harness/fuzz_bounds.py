"""What every target of fuzzing is held to: it doesn't hang, allocates little, and says what is
wrong in one good line.

It knows processes and the error tree; no target.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError

PATIENCE = 20  # seconds of processor time after which a target hangs: a busy machine is no hang
# bytes of address space that a target may take beyond what there is; a thread takes 0.1 of it
ROOM = 2 << 30
LONGEST_ERROR = 1_500  # characters: a line that a person reads, paths and all


@contextlib.contextmanager
def bounded(patience: int = PATIENCE) -> Iterator[None]:
    """Turns a hang into a TimeoutError and a giant allocation into a MemoryError. For the main
    thread."""

    def hangs(*_: object) -> None:
        raise TimeoutError(f"it takes more than {patience} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    usual = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, hangs)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, usual[1]))
    signal.setitimer(signal.ITIMER_PROF, patience)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, usual)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def in_memory() -> Iterator[Path]:
    """A folder on no disk, where there is such a place:
    thousands of openings cost a tenth there."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


def check_error(error: PenstockError) -> None:
    """One line, that can be printed and sent, and that a person reads."""
    said = str(error)
    assert said and "\n" not in said and len(said) <= LONGEST_ERROR, said[:2_000]
    said.encode()


def strict(data: bytes) -> Any:
    """JSON as the standard has it: no NaN."""
    return json.loads(data, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
