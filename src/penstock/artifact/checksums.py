"""Checksums of a built engine's files. A file has the SHA-256 of each piece of 16 MiB. Several
threads compute them, since hashing releases the interpreter's lock (1.5 GB/s on one core of an
EPYC). Knows files and bytes, not their content.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import islice
from pathlib import Path

from penstock.artifact.manifest import FileSums
from penstock.disk import open_plain
from penstock.errors import CheckpointError

PIECE = 16 << 20  # bytes of a piece with a checksum of its own
MOST_THREADS = 8
WAY_OUT = "copy the artifact again, or build it again"


def sum_files(
    folder: Path, names: Iterable[str], threads: int | None = None
) -> dict[str, FileSums]:
    """Returns size and checksums of these files of the folder. Raises CheckpointError when one
    cannot be read."""
    sizes = {name: _size(folder / name) for name in names}
    with ThreadPoolExecutor(threads or usual_threads(), "penstock-sums") as pool:
        pieces = {
            name: [pool.submit(_sum, folder / name, at) for at in _starts(size)]
            for name, size in sizes.items()
        }
        try:
            return {
                n: FileSums(bytes=sizes[n], pieces=[each.result() for each in pieces[n]])
                for n in sizes
            }
        finally:
            pool.shutdown(cancel_futures=True)


def verify_files(folder: Path, files: Mapping[str, FileSums], threads: int | None = None) -> None:
    """Reads every byte of these files of the folder. Raises CheckpointError, which names the file,
    at the first that is missing, has another size, or has a piece that differs."""
    for name, told in files.items():
        size = _size(folder / name)
        if size != told.bytes or len(told.pieces) != len(_starts(size)):
            raise CheckpointError(
                f"{folder / name} has {size} bytes and was built with {told.bytes}: {WAY_OUT}"
            )
    todo = (
        (folder / n, place, told)
        for n, each in files.items()
        for place, told in enumerate(each.pieces)
    )
    count = threads or usual_threads()
    with ThreadPoolExecutor(count, "penstock-sums") as pool:
        while some := list(islice(todo, 8 * count)):
            list(pool.map(lambda each: _verify(*each), some))


def usual_threads() -> int:
    """Returns the default number of threads for checksums."""
    return min(MOST_THREADS, os.cpu_count() or 1)


def _verify(path: Path, place: int, told: str) -> None:
    if _sum(path, place * PIECE) != told:
        megabytes = f"{place * PIECE >> 20} to {(place + 1) * PIECE >> 20}"
        raise CheckpointError(
            f"{path} is not as it was built (its checksum differs in MiB {megabytes}): {WAY_OUT}"
        )


def _sum(path: Path, start: int) -> str:
    """Returns the checksum of one piece, read a mebibyte at a time."""
    state = sha256()
    try:
        with open_plain(path) as file:
            file.seek(start)
            for part in _parts(file.fileno()):
                state.update(part)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror or error}): {WAY_OUT}"
        ) from error
    return state.hexdigest()


def _parts(handle: int) -> Iterator[bytes]:
    left = PIECE
    while left and (part := os.read(handle, min(left, 1 << 20))):
        left -= len(part)
        yield part


def _starts(size: int) -> range:
    return range(0, size, PIECE)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(
            f"{path} is missing or cannot be read ({error.strerror}): {WAY_OUT}"
        ) from error
