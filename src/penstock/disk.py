"""Safe reading and writing of files. Checks a path, writes a file whole or not at all, and explains
why a write failed.

Devices and pipes are never read, written, replaced or deleted. Knows no file's content.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from penstock.errors import CapacityError, JournalError, PenstockError, UsageError


def file_at(path: Path, *, link: bool = True) -> os.stat_result | None:
    """Returns the status of the file at `path`, or None when nothing is there. Links are followed.
    Raises JournalError for a folder, device, pipe or socket: opening a pipe may hang, and a device
    must not be replaced. link: if False, a link at `path` is refused, because its target may belong
    to somebody else.
    """
    if not link and path.is_symlink():
        raise JournalError(
            f"{path} is a link: name the file that it leads to, or take the link away"
        )
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


def check_writable(path: Path, *, link: bool = False) -> None:
    """Raises JournalError when `path` could not be written. Call it before a long job begins; it
    leaves no file behind. link: as in file_at."""
    folder = path.parent
    there = file_at(path, link=link)
    if not folder.is_dir():
        raise JournalError(f"{folder} is no folder: make it first, or name another output")
    if not (os.access(folder if there is None else path, os.W_OK) and os.access(folder, os.W_OK)):
        raise JournalError(f"{path} cannot be written: name an output in a folder of yours")


def open_plain(path: Path) -> BufferedReader:
    """Opens a file for reading. Raises OSError, with the reason in `strerror`, for anything but a
    regular file: reading a pipe would wait, and a device has no end."""
    # O_NONBLOCK: opening a pipe that has no writer returns at once instead of waiting
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_plain(path: Path, most: int) -> bytes:
    """Returns a file's content. Raises OSError as `open_plain` does, and for a file of more than
    `most` bytes."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and {most:,} are the most")
        return file.read(size)


def write_whole(
    path: Path, content: bytes | Callable[[BinaryIO], object], *, link: bool = False
) -> None:
    """Writes a file whole or not at all: writes a draft with a random name beside it, then renames
    the draft over it.

    content: the bytes, or a function that writes them into the open file it is given. link: if
    True, writes through a link at `path`, as the shell's > does; else a link is refused. Raises
    JournalError, or CapacityError when the disk is full.
    """
    file_at(path, link=link)
    there = Path(os.path.realpath(path)) if link else path
    draft = there.with_name(f"{there.name}.{secrets.token_hex(4)}.part")
    try:
        with draft.open("xb") as file:
            content(file) if callable(content) else file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(there)
        sync_folder(there.parent)
    except OSError as error:
        raise why_not_written(error, path) from error
    finally:
        # Deleting the draft may fail for the same reason (a name too long, a read-only disk): the
        # first error is the one to report.
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def write_new(path: Path, content: bytes) -> None:
    """Writes a new file, whole or not at all. Raises UsageError, and changes nothing, when anything
    is at `path`, even a broken link; other errors as in `write_whole`."""
    try:
        file = path.open("xb")
    except FileExistsError as error:
        raise UsageError(
            f"{path} is there already, perhaps with changes of yours: name another, or take it"
            " away",
            param="out",
        ) from error
    except OSError as error:
        raise why_not_written(error, path) from error
    try:
        with file:
            file.write(content)
    except OSError as error:
        # if deleting the file fails too, the first error is raised
        with contextlib.suppress(OSError):
            path.unlink()
        raise why_not_written(error, path) from error


def sync_folder(folder: Path) -> None:
    """Flushes a folder's list of files to the disk (fsync)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def why_not_written(error: OSError, path: Path) -> PenstockError:
    """Returns the error to raise when a file could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(
            f"the disk of {path} is full: make room and start the same command again"
        )
    return JournalError(
        f"{path} cannot be written ({(error.strerror or str(error)).lower()}): name another output"
    )
