"""Folder of files and batches (--state-dir). Has the database, the files' contents and
a lock. One thread does its disk work: `await state.call(state.database.file, ...)`. Knows the
folder's parts; no HTTP, no engine."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from penstock.errors import CapacityError, UsageError
from penstock.server.batch.database import BatchDatabase
from penstock.server.batch.disk_errors import describe, storage_errors
from penstock.server.batch.file_store import FileStore

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")

_OURS = frozenset({"state.sqlite", "files", "batches", "lock"})
# names that are allowed beside ours; this one exists on a separate disk
_BESIDE = frozenset({"lost+found"})


class StateFolder:
    """An open folder of files and batches. Raises UsageError for an unsuitable folder,
    CapacityError if another server uses it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _check_ours(folder)
        self._lock = _locked(folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-state")
        try:
            self.file_store = FileStore(folder)
            self.database = BatchDatabase(folder / "state.sqlite", beside=not self.file_store.empty)
            self.file_store.sweep(*self.database.known())
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, OSError | sqlite3.Error):
                raise _unusable(folder, error) from error
            raise

    async def call(
        self,
        work: Callable[Parameters, Result],
        *values: Parameters.args,
        **named: Parameters.kwargs,
    ) -> Result:
        """Runs `work` in the folder's thread and returns its result. Raises StorageError for a disk
        error, and the errors of `work`."""
        with storage_errors():
            return await self.attempt(work, *values, **named)

    async def attempt(
        self,
        work: Callable[Parameters, Result],
        *values: Parameters.args,
        **named: Parameters.kwargs,
    ) -> Result:
        """Runs `work` like `call`, but raises disk errors unchanged."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: work(*values, **named))

    def close(self) -> None:
        """Closes the folder after the thread has finished its work; no calls may follow."""
        self._thread.shutdown()
        self.database.close()
        os.close(self._lock)


@contextlib.contextmanager
def opened(folder: Path | str | None) -> Iterator[StateFolder | None]:
    """Opens the folder of files and batches for a block; yields None without a folder. Raises the
    errors of StateFolder."""
    if folder is None:
        yield None
        return
    state = StateFolder(Path(folder))
    try:
        yield state
    finally:
        state.close()


def _check_ours(folder: Path) -> None:
    """Raises UsageError for a folder with other contents, which is probably a mistake."""
    try:
        names = {each.name for each in folder.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unusable(folder, error) from error
    others = sorted(name for name in names - _BESIDE if not name.startswith("."))
    if others and not names & _OURS:
        shown = "".join(letter if letter.isprintable() else "?" for letter in others[0][:80])
        raise UsageError(
            f"the state folder {folder} holds other things ({shown}) and nothing of a server's:"
            " name a new folder, or an empty one, as --state-dir",
            param="state_dir",
        )


def _locked(folder: Path) -> int:
    """Locks the folder and returns the lock's file descriptor. The kernel releases the lock when
    the process ends in any way. Raises UsageError, CapacityError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(folder, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise CapacityError(
            f"the state folder {folder} is in use by another server: end it, or name another"
            " --state-dir",
            param="state_dir",
        ) from error
    return lock


def _unusable(folder: Path, error: Exception) -> UsageError:
    return UsageError(
        f"the state folder {folder} cannot be used ({describe(error)}): name a folder of yours as"
        " --state-dir",
        param="state_dir",
    )
