"""The reserve: a few megabytes of the state folder's disk that are given up, where that is full, for what makes room.

To delete a file or to cancel a batch the database has to write first; without this nobody could do either on a full
disk, and only who has a shell there would get it free. It knows one file; no database, no HTTP.
"""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

SIZE = 4 << 20  # bytes: a thousand pages of the database
PIECE = 1 << 18
NAME = "reserve"


class Reserve:
    """That of one state folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def keep(self) -> None:
        """Takes what it lacks. Where there is no room for all of it, it has what there is: any page helps."""
        try:
            with self._path.open("ab", buffering=0) as file:
                while (lacks := SIZE - file.tell()) > 0:
                    file.write(bytes(min(lacks, PIECE)))
        except OSError:  # it is no use to anybody but in need, and nobody who asks for something else fails by it
            return

    def give(self) -> bool:
        """Gives its room to the disk. False: there was none to give."""
        try:
            size = self._path.stat().st_size
            self._path.unlink()
        except OSError:
            return False
        return size > 0


def is_full(error: BaseException) -> bool:
    """Whether it says that the disk, or the part of it that is ours, has no room."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, sqlite3.OperationalError) and "is full" in str(error)
