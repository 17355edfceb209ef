"""Standard input and output in place of files. With `-` as its input a run copies standard input to
a file, since it reads rows twice; with `-` as its output it prints each row as it ends. Knows bytes
and rows; no engine.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.disk import why_not_written
from penstock.errors import JournalError

STREAM = Path("-")
OUTPUT = 1  # file descriptor of standard output
GZIP = b"\x1f\x8b"  # first bytes of a gzip file

Show = Callable[[Mapping[str, Any]], None]


@contextlib.contextmanager
def taken_in(source: Path) -> Iterator[Path]:
    """Yields a file with the rows of `source`: `source` itself, or a temporary copy of standard
    input. Raises CapacityError or JournalError if the copy cannot be written."""
    if source != STREAM:
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        given = sys.stdin.buffer
        start = given.read(len(GZIP))
        path = Path(folder) / ("in.jsonl.gz" if start == GZIP else "in.jsonl")
        try:
            with path.open("wb") as file:
                file.write(start)
                shutil.copyfileobj(given, file, 1 << 20)
        except OSError as error:
            raise why_not_written(error, path) from error
        yield path


@contextlib.contextmanager
def given_out(out: Path) -> Iterator[tuple[Path, Show | None]]:
    """Yields the file in which a run keeps its rows, and a function that prints each finished row
    to standard output. The function is None if `out` is a file."""
    if out != STREAM:
        yield out, None
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        yield Path(folder) / "out.jsonl", _show


def _show(row: Mapping[str, Any]) -> None:
    """Writes a row to standard output and flushes it. Raises JournalError if the reader of the pipe
    is gone."""
    line = json.dumps(row).encode() + b"\n"
    try:
        with open(OUTPUT, "wb", closefd=False) as file:
            file.write(line)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise JournalError(
            f"standard output takes no more rows ({why}): name a file as OUT to go on from"
        ) from error
