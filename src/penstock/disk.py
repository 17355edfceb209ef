"""A disk as whoever writes a file meets it: what stands at a name, a file written whole, and why a
write failed.

No device and no pipe is read, written, replaced or taken away. It knows no file's content, and
nobody who writes.
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
    """What is at `path`, links followed; None for nothing. Raises JournalError for anything but a
    file: opening a pipe may hang, and nobody means a device to be replaced. link: whether `path`
    may be one; else it is refused, for what it leads to may be somebody's, or nobody's yet."""
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
    """Raises JournalError, before anything long begins, when `path` could not be written. Leaves
    nothing behind. link: as file_at's."""
    folder = path.parent
    there = file_at(path, link=link)
    if not folder.is_dir():
        raise JournalError(f"{folder} is no folder: make it first, or name another output")
    if not (os.access(folder if there is None else path, os.W_OK) and os.access(folder, os.W_OK)):
        raise JournalError(f"{path} cannot be written: name an output in a folder of yours")


def open_plain(path: Path) -> BufferedReader:
    """Opens a file to be read. Raises OSError, with why in its `strerror`, for anything else: a
    pipe would be waited for, and a device has no end."""
    # a pipe without a writer is open at once then
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_plain(path: Path, most: int) -> bytes:
    """Returns a file's content, of at most so many bytes. Raises OSError as `open_plain` does, and
    for a longer one."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and {most:,} are the most")
        return file.read(size)


def write_whole(
    path: Path, content: bytes | Callable[[BinaryIO], object], *, link: bool = False
) -> None:
    """Writes a file whole or not at all: beside it first, under a name that is nobody else's, then
    moved over it.

    content: or what writes it into a file that it is given. link: whether one is written through,
    as a shell's > does; else it is refused. Errors as Journal's."""
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
        # What failed before may fail this too (a name too long, a disk that only reads): that first
        # error is told.
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def write_new(path: Path, content: bytes) -> None:
    """Writes a file that is not there yet, whole or not at all. Whatever stands at the name stays
    as it is, a link to nothing too. Raises UsageError then, else as `write_whole` does."""
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
        with contextlib.suppress(OSError):  # the first error is told
            path.unlink()
        raise why_not_written(error, path) from error


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
        return CapacityError(
            f"the disk of {path} is full: make room and start the same command again"
        )
    return JournalError(
        f"{path} cannot be written ({(error.strerror or str(error)).lower()}): name another output"
    )
