"""A disk as whoever writes a file meets it: what stands at a name, its folder's sync, and why a write failed.

It knows no file's content, and nobody who writes.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from penstock.errors import CapacityError, JournalError, PenstockError


def file_at(path: Path) -> os.stat_result | None:
    """What is at `path`, links followed; None for nothing. Raises JournalError for anything but a file: opening a pipe
    may hang, and nobody means a device to be replaced."""
    try:
        there = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise why_not_written(error, path) from error
    if stat.S_ISDIR(there.st_mode):
        raise JournalError(f"{path} is a folder: name a file")
    if not stat.S_ISREG(there.st_mode):
        raise JournalError(f"{path} is a device, a pipe or a socket: name a file")
    return there


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def why_not_written(error: OSError, path: Path) -> PenstockError:
    """The error to raise where a file could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(f"the disk of {path} is full: make room and start the same command again")
    return JournalError(f"{path} cannot be written ({(error.strerror or str(error)).lower()}): name another output")
