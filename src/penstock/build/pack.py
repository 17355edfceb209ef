"""Computes checksums for a built engine's manifest. Knows files."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from penstock.artifact.checksums import sum_files
from penstock.artifact.manifest import MANIFEST, STATE, FileSums
from penstock.disk import why_not_written


def sum_folder(folder: Path, known: Collection[str] = ()) -> dict[str, FileSums]:
    """Flushes the folder's files, except the known ones, to the disk and returns their checksums.
    Raises JournalError, CapacityError."""
    for draft in folder.glob("*.part"):  # left by a process that was killed while writing
        draft.unlink()
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] not in (MANIFEST, STATE)
    )
    names = [name for name in names if name not in known]
    for name in names:
        try:
            handle = os.open(folder / name, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise why_not_written(error, folder / name) from error
    return sum_files(folder, names)
