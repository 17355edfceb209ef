"""Errors of the disk with batches' files. Decides which are temporary and which mean
damage, and defines the errors that clients get. Knows errors; no file, no database.
"""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from collections.abc import Iterator

from penstock.errors import CapacityError, JournalError, PenstockError
from penstock.server.openai.http_errors import HttpError

_FULL = (
    "the disk of the server's state folder is full: delete files of yours (DELETE /v1/files/ID), or"
    " ask whoever runs it to make room"
)


class StorageError(HttpError):
    """Raised when the disk that holds files and batches is full or fails."""

    status, code = 507, "storage"


class FileDamagedError(HttpError):
    """Raised when a file's content on the disk differs from what was stored.
    Retrying doesn't help."""

    status, code = 500, "file_damaged"

    def __init__(self, how: str) -> None:
        message = (
            f"this file is damaged on the server's disk ({how}): upload it again, or tell whoever"
            " runs the server"
        )
        super().__init__(message, headers={"x-should-retry": "false"})


def is_disk_fault(error: BaseException) -> bool:
    """Returns True for an error of the disk or the database that may not occur again on a retry."""
    cause = error.__cause__ if isinstance(error, CapacityError | JournalError) else error
    return isinstance(cause, OSError | sqlite3.OperationalError) and not isinstance(
        cause, FileNotFoundError
    )


def is_damage(error: BaseException) -> bool:
    """Returns True if a batch's working files are missing or inconsistent. Only this server writes
    them, so it means damage."""
    missing = isinstance(error, FileNotFoundError) or isinstance(error.__cause__, FileNotFoundError)
    return missing or (isinstance(error, JournalError) and error.__cause__ is None)


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Converts errors of the disk or the database in the block to StorageError, whose message has
    no path."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise _storage_error(error) from error


def _storage_error(error: OSError | sqlite3.Error) -> StorageError:
    if (
        isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    ) or "is full" in str(error):
        return StorageError(_FULL)
    return StorageError(
        f"the disk of the server's state folder failed at this ({describe(error)}): try again"
    )


def describe(error: BaseException) -> str:
    """Returns an error in a few words. Uses the cause of a PenstockError if it has one, since its
    own message is written for the user of a command."""
    cause = (
        error.__cause__
        if isinstance(error, PenstockError) and error.__cause__ is not None
        else error
    )
    words = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return " ".join(words.split()).lower()[:100]
